"""The step loop: inbox, plan, launch, collect, commit, deliver."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Protocol

from wkvm_core.daemon.door import Door
from wkvm_core.daemon.inbox import Ask, Drain, Finish, Gone, Inbox, Item, Probe, Submit, Withdraw
from wkvm_core.daemon.mail import Mail
from wkvm_core.daemon.meters import Meters
from wkvm_core.daemon.notify import Notifier
from wkvm_core.daemon.registry import Registry
from wkvm_core.errors import DeviceLost
from wkvm_core.sched.plan import StepPlan, StepResult
from wkvm_core.sched.scheduler import Scheduler
from wkvm_proto.messages import Metrics, Pong
from wkvm_proto.names import ErrorCode

_TICK_S = 1.0
_IDLE_S = 0.5
_MAX_ITEMS = 256
"""Items taken from the inbox before the next step."""
_MAX_FAILED_STEPS = 8


class Runs(Protocol):
    """Executes plans in order."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan."""

    def collect(self) -> StepResult:
        """The oldest result that was not collected."""
        ...


class Loop:
    """One turn: take what came in, plan, launch, and commit the oldest step once `overlap` more are in flight.

    A step that raises fails the requests it holds and no other; when step after step does, the device is lost.
    """

    def __init__(
        self,
        inbox: Inbox,
        door: Door,
        registry: Registry,
        scheduler: Scheduler,
        runner: Runs,
        mail: Mail,
        meters: Meters,
        notifier: Notifier,
        *,
        overlap: int,
        drain_s: float,
        gauges: Callable[[], dict[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._door = door
        self._registry = registry
        self._scheduler = scheduler
        self._runner = runner
        self._mail = mail
        self._meters = meters
        self._notifier = notifier
        self._overlap = overlap
        self._drain_s = drain_s
        self._gauges = gauges
        self._clock = clock
        self._step = 0
        self._failed_steps = 0
        self._next_tick = 0.0
        self._drain_until: float | None = None

    @property
    def step(self) -> int:
        """Number of the newest step."""
        return self._step

    def run_forever(self) -> None:
        """Until drained. Raises DeviceLost."""
        while not self._drained():
            self.turn()
        self._deliver()

    def turn(self) -> None:
        """One turn; waits for the inbox when there is nothing to run."""
        self._take_inbox(wait=False)
        now = self._clock()
        plan = self._scheduler.plan(now)
        if plan is not None:
            self._step = plan.step
            self._launch(plan)
        in_flight = self._scheduler.in_flight
        if in_flight > self._overlap or (plan is None and in_flight):
            result = self._runner.collect()
            self._scheduler.commit(result, self._clock())
        self._deliver()
        self._tick()
        if plan is None and not in_flight and not self._drained():
            self._take_inbox(wait=True)

    def _launch(self, plan: StepPlan) -> None:
        started = self._clock()
        try:
            self._runner.launch(plan)
        except DeviceLost:
            raise
        except Exception:
            traceback.print_exc()
            self._meters.count("wkvm_steps_failed_total")
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise DeviceLost(f"{self._failed_steps} steps failed one after another") from None
            self._scheduler.abandon(ErrorCode.INTERNAL, "the engine could not run this request")
            return
        self._failed_steps = 0
        self._meters.observe("wkvm_step_seconds", self._clock() - started)
        self._meters.observe("wkvm_step_rows", len(plan.rows))

    def _deliver(self) -> None:
        outcomes = self._scheduler.take()
        if outcomes:
            self._door.deliver(outcomes, self._step, self._clock())

    def _take_inbox(self, *, wait: bool) -> None:
        item = self._inbox.take(self._patience() if wait else 0.0)
        for _ in range(_MAX_ITEMS):
            if item is None:
                return
            self._take(item)
            item = self._inbox.take(0.0)
        if item is not None:
            self._take(item)

    def _take(self, item: Item) -> None:
        match item:
            case Submit():
                self._door.submit(item, self._clock())
            case Withdraw():
                self._door.withdraw(item.client, item.wire)
            case Ask():
                self._registry.answer(item)
            case Finish():
                item.then(item.outcome)
            case Probe():
                self._mail.post(item.client, Pong(item.nonce, self._step, through_loop=True))
            case Gone():
                self._door.close_client(item.client, slow=item.slow)
            case Drain():
                self._drain(now=item.now)

    def _patience(self) -> float:
        """Seconds to wait for the inbox: until the next tick, or the first deadline of a request."""
        now = self._clock()
        until = min(now + _IDLE_S, self._next_tick, self._drain_until or now + _IDLE_S)
        deadline = self._scheduler.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        return max(until - now, 0.001)

    def _tick(self) -> None:
        """Once a second, from progress: watchdog, metrics."""
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        self._notifier.watchdog()
        self._mail.publish(self._metrics(), self._door.draining, self._scheduler.backlog.wait_s)
        if not self._mail.alive:
            raise DeviceLost("the mail thread ended")

    def _metrics(self) -> Metrics:
        counts, scheduler = self._scheduler.counts, self._scheduler
        counters = {f"wkvm_{name}_total": float(getattr(counts, name)) for name in counts.__slots__}
        gauges = {
            "wkvm_slots_used": float(scheduler.arena.used),
            "wkvm_slots_free": float(scheduler.arena.free),
            "wkvm_host_blocks_used": float(scheduler.blocks.num_blocks - scheduler.blocks.free),
            "wkvm_host_blocks_free": float(scheduler.blocks.free),
            "wkvm_requests_running": float(scheduler.num_running),
            "wkvm_requests_waiting": float(scheduler.num_waiting),
            "wkvm_requests_open": float(scheduler.num_requests),
            "wkvm_queued_tokens": scheduler.backlog.tokens,
            "wkvm_lanes_free": float(scheduler.free_lanes),
        }
        return self._meters.read(counters, gauges | self._gauges())

    # ------------------------------------------------------------------------------------------ the end

    def _drain(self, *, now: bool) -> None:
        if not self._door.draining:
            self._notifier.stopping()
        self._door.draining = True
        self._drain_until = self._clock() + (0.0 if now else self._drain_s)
        self._next_tick = 0.0

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        if self._scheduler.num_requests and self._clock() >= self._drain_until:
            self._scheduler.fail_all(ErrorCode.DRAINING, "the engine was shut down before this request ended")
        return not self._scheduler.num_requests
