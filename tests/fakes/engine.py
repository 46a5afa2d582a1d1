"""The scheduler driven over a fake device and a fake clock, and what every request should have got."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tests.fakes.device import EMPTY, Device, State, consume, next_token
from wkvm_core.sched.limits import Limits
from wkvm_core.sched.outcomes import Failure, Finish
from wkvm_core.sched.plan import StepPlan
from wkvm_core.sched.request import Request
from wkvm_core.sched.scheduler import Scheduler
from wkvm_core.sched.stops import StopCompiler, VocabularyBytes
from wkvm_core.state.arena import Arena, Blocks
from wkvm_core.state.layout import Fingerprint
from wkvm_core.state.snapshot import Snapshot
from wkvm_proto.columns import pack_u32
from wkvm_proto.names import FinishReason
from wkvm_proto.sampling import Sampling

VOCABULARY = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\n", b"c"]


@dataclass
class Answer:
    """What a request got."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    failure: Failure | None = None


class Engine:
    """`depth` plans may be in flight before the oldest result is read."""

    def __init__(
        self,
        *,
        slots: int = 4,
        blocks: int = 8,
        rows: int = 8,
        step_tokens: int = 16,
        chunk_tokens: int = 8,
        depth: int = 0,
        slice_tokens: int = 0,
        mixed_tokens: int = 1 << 62,
        max_queued: int = 1000,
        max_queued_tokens: int = 1_000_000,
    ) -> None:
        limits = Limits(
            rows, max(step_tokens, rows), chunk_tokens, max_queued, max_queued_tokens, slice_tokens, mixed_tokens
        )
        self.arena, self.blocks = Arena(slots), Blocks(blocks)
        self.scheduler = Scheduler(self.arena, self.blocks, limits, Fingerprint("m", "l", "n"))
        self.device = Device(slots, blocks, len(VOCABULARY))
        self.compiler = StopCompiler(VocabularyBytes(VOCABULARY), len(VOCABULARY))
        self.depth = depth
        self.now = 0.0
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []
        self._number = 0

    def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        stop: tuple[bytes, ...] = (),
        stop_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        n: int = 1,
        keep: bool = False,
        priority: int = 0,
        tenant: str = "t",
        deadline: float | None = None,
        origin: Snapshot | None = None,
    ) -> int:
        """Submits and returns the request's number. A refusal leaves no trace."""
        self._number += 1
        if origin is not None:
            self.blocks.retain(origin.block)
        request = Request(
            number=self._number,
            client=None,
            tenant=tenant,
            prompt=pack_u32(prompt),
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop_ids=pack_u32(stop_ids),
                min_tokens=min_tokens,
            ),
            n=n,
            stops=self.compiler.compile(stop) if stop else None,
            vocabulary=self.compiler.vocabulary if stop else None,
            priority=priority,
            deadline=deadline,
            origin=origin,
            keep=keep,
        )
        try:
            self.scheduler.submit(request)
        except BaseException:
            if origin is not None:
                self.blocks.release(origin.block)
            raise
        self.answers[self._number] = Answer()
        return self._number

    def turn(self) -> StepPlan | None:
        """One turn of the step loop."""
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.device.launch(plan)
        if self.scheduler.in_flight > self.depth or (plan is None and self.scheduler.in_flight):
            self.scheduler.commit(self.device.collect(), self.now)
        self.gather()
        return plan

    def gather(self) -> None:
        """Sorts what came out by request."""
        out = self.scheduler.take()
        for (request, sample), token in zip(out.owners, out.ids, strict=True):
            self.answers[request.number].tokens.setdefault(sample, []).append(token)
        for finish in out.finished:
            answer = self.answers[finish.request.number]
            assert finish.sample not in answer.finishes, "finished twice"
            assert answer.failure is None
            answer.finishes[finish.sample] = finish
        for failure in out.failed:
            assert self.answers[failure.request.number].failure is None, "failed twice"
            self.answers[failure.request.number].failure = failure

    def run(self, turns: int = 10_000) -> None:
        """Until every request is answered."""
        for _ in range(turns):
            if not self.scheduler.num_requests and not self.scheduler.in_flight:
                return
            self.turn()
        raise AssertionError(f"{self.scheduler.num_requests} requests are not answered after {turns} turns")

    def assert_idle(self, saved: int = 0) -> None:
        """Nothing is left: no slot, no lane, no block but those of saved snapshots."""
        assert self.arena.used == 0
        assert self.blocks.num_blocks - self.blocks.free == saved
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        seating = self.scheduler._seating
        assert seating.seats.free_lanes == self.scheduler.limits.max_rows
        assert not any(seating._halt_sets._users)
        assert not seating._forks
        assert seating.seats._spares_out == seating.seats._halting == 0
        assert self.scheduler.backlog.requests == 0


@dataclass
class Expected:
    """One sample, computed alone and in a straight line."""

    delivered: list[int]
    reason: FinishReason
    tail: bytes
    stop_text: bytes
    generated: int
    kept: State


def expected(request: Request, sample: int, start: State = EMPTY) -> Expected:
    """Reads the prompt, samples, and searches the text for stops after every token."""
    sampling = request.sampling
    state = start
    for token in array("I", request.prompt):
        state = consume(state, token)
    prompt_end = state
    states = [state]  # states[i] has consumed i tokens of the output
    output: list[int] = []
    stop_ids = array("I", sampling.stop_ids)
    stops = request.stops.automaton.stops if request.stops is not None else ()
    while True:
        if len(output) >= sampling.max_tokens:
            return Expected(output, FinishReason.LENGTH, b"", b"", len(output), states[len(output)])
        token = next_token(states[-1], sampling, sample, len(output), len(VOCABULARY))
        while len(output) < sampling.min_tokens and token in stop_ids:
            token = (token + 1) % len(VOCABULARY)
        if token in stop_ids:
            return Expected(output, FinishReason.STOP_TOKEN, b"", b"", len(output) + 1, states[-1])
        output.append(token)
        states.append(consume(states[-1], token))
        looked_at = output[sampling.min_tokens :]
        text = b"".join(VOCABULARY[t] for t in looked_at)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, _, stop = min(ends)
            border, kept, length = end - len(stop), sampling.min_tokens, 0
            for token in looked_at:
                if length + len(VOCABULARY[token]) > border:
                    break
                length += len(VOCABULARY[token])
                kept += 1
            tail = VOCABULARY[output[kept]][: border - length]
            assert states[0] == prompt_end
            return Expected(output[:kept], FinishReason.STOP_TEXT, tail, stop, len(output), states[kept])
