"""Between mail and scheduler: requests in, events out. Runs on the step loop's thread."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from wkvm_core.daemon.caller import Caller, Tray
from wkvm_core.daemon.desk import failed
from wkvm_core.daemon.inbox import Submit
from wkvm_core.daemon.meters import Meters
from wkvm_core.daemon.registry import Registry
from wkvm_core.errors import Refused
from wkvm_core.sched.outcomes import Finish, Outcomes
from wkvm_core.sched.request import Request
from wkvm_core.sched.scheduler import Scheduler
from wkvm_core.state.arena import Blocks
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.messages import (
    Accepted,
    Event,
    Failed,
    Finished,
    TokenLogprobs,
    Tokens,
)
from wkvm_proto.names import ErrorCode

Post = Callable[[bytes, Event], None]


class Door:
    """Knows every request that is not answered, by its frontend and the frontend's number."""

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        blocks: Blocks,
        meters: Meters,
        post: Post,
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._blocks = blocks
        self._meters = meters
        self._post = post
        self._open: dict[tuple[bytes, int], Request] = {}
        self.draining = False

    def submit(self, item: Submit, now: float) -> None:
        """Puts a request into the queue and says so, or says why not."""
        request, caller = item.request, item.caller
        key = (caller.tray.client, caller.wire)
        try:
            if self.draining:
                raise Refused(ErrorCode.DRAINING, "the engine is shutting down", retry_after_s=2.0)
            if key in self._open:
                raise Refused(ErrorCode.DUPLICATE_REQUEST, f"request {caller.wire} is still running", param="request")
            reused = 0
            if item.state:
                named = self._registry.find(request.tenant, item.state)
                origin = named.snapshot
                caller.parents = (str(named.handle),)
                reused = origin.cursor.tokens
                caller.num_prompt += reused
                request = msgspec.structs.replace(request, origin=origin)
                self._blocks.retain(origin.block)
            try:
                self._scheduler.submit(request)
            except Refused:
                if request.origin is not None:
                    self._blocks.release(request.origin.block)
                raise
        except Refused as refused:
            self._meters.count("wkvm_requests_refused_total", f'code="{refused.code}"')
            self._post(caller.tray.client, failed(caller.wire, refused))
            return
        self._open[key] = request
        reuse = "state" if item.state else "cold"
        self._post(caller.tray.client, Accepted(caller.wire, caller.num_prompt, reused, reuse))

    def withdraw(self, client: bytes, wire: int) -> None:
        """A frontend cancels; an unknown number is answered already."""
        request = self._open.get((client, wire))
        if request is not None:
            self._scheduler.cancel(request.number)

    def close_client(self, client: bytes, *, slow: bool) -> None:
        """A frontend is gone, or does not read: its requests end."""
        for key, request in list(self._open.items()):
            if key[0] == client:
                if slow:
                    text = "the frontend did not read what was sent to it"
                    self._scheduler.fail(request.number, ErrorCode.SLOW_CONSUMER, text)
                else:
                    self._scheduler.cancel(request.number)

    def deliver(self, outcomes: Outcomes, step: int, now: float) -> None:
        """Sends what came out: first one frame of tokens to each frontend, then ends and failures."""
        trays = self._fill_trays(outcomes, now)
        for tray in trays:
            samples = pack_u32(tray.samples) if any(tray.samples) else b""
            tokens = Tokens(step, pack_u32(tray.requests), pack_u32(tray.ids), b"", samples, tuple(tray.logprobs))
            self._post(tray.client, tokens)
            tray.clear()
        for finish in outcomes.finished:
            self._finished(finish, now)
        for failure in outcomes.failed:
            caller: Caller = failure.request.client
            self._close(failure.request)
            self._meters.failed(failure.code)
            self._post(
                caller.tray.client, Failed(caller.wire, failure.code, failure.message, "", failure.retry_after_s)
            )

    def _fill_trays(self, outcomes: Outcomes, now: float) -> list[Tray]:
        trays: list[Tray] = []
        gaps: list[float] = []
        logprobs = outcomes.logprobs
        for index, ((request, sample), token) in enumerate(zip(outcomes.owners, outcomes.ids, strict=True)):
            caller: Caller = request.client
            tray = caller.tray
            if not tray.ids:
                trays.append(tray)
            if logprobs and index in logprobs:
                value = logprobs[index]
                tray.logprobs.append(
                    TokenLogprobs(len(tray.ids), pack_f32([value.chosen]), pack_u32(value.top_ids), pack_f32(value.top))
                )
            tray.requests.append(caller.wire)
            tray.samples.append(sample)
            tray.ids.append(token)
            last = caller.last_token[sample]
            caller.last_token[sample] = now
            if last:
                gaps.append(now - last)
            else:
                self._meters.observe("wkvm_time_to_first_token_seconds", now - caller.arrived)
        if gaps:
            self._meters.observe_all("wkvm_inter_token_latency_seconds", gaps)
        return trays

    def _finished(self, finish: Finish, now: float) -> None:
        request = finish.request
        caller: Caller = request.client
        saved_as = ""
        if finish.snapshot is not None:
            saved_as = str(self._registry.save(request.tenant, caller.save_as, finish.snapshot, caller.parents))
        self._post(
            caller.tray.client,
            Finished(
                request=caller.wire,
                sample=finish.sample,
                reason=finish.reason,
                prompt_tokens=caller.num_prompt,
                generated_tokens=finish.generated,
                delivered_tokens=finish.delivered,
                consumed_tokens=finish.consumed,
                tail=finish.tail,
                stop_text=finish.stop_text,
                stop_id=finish.stop_id,
                saved_as=saved_as,
            ),
        )
        self._meters.finished(finish.reason, finish.generated, now - caller.arrived)
        if not self._scheduler.holds(request.number):
            self._close(request)

    def _close(self, request: Request) -> None:
        caller: Caller = request.client
        self._open.pop((caller.tray.client, caller.wire), None)
