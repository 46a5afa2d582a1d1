"""What runs next. No phases: every sequence's consumed tokens converge to its known ones under one token budget."""

from __future__ import annotations

import heapq
from collections import Counter, deque

from wkvm_core.errors import Refused
from wkvm_core.sched.backlog import Backlog
from wkvm_core.sched.commit import Commit
from wkvm_core.sched.counts import Counts
from wkvm_core.sched.group import Group
from wkvm_core.sched.limits import Limits
from wkvm_core.sched.outcomes import Failure, Finish, Outcomes
from wkvm_core.sched.plan import NO_LANE, Read, Row, StepPlan, StepResult
from wkvm_core.sched.request import Request
from wkvm_core.sched.seating import Seating
from wkvm_core.sched.sequence import TRUNK, Fork, Phase, Sequence
from wkvm_core.sched.step import Step
from wkvm_core.state.arena import Arena, Blocks
from wkvm_core.state.layout import Fingerprint
from wkvm_proto.names import ErrorCode, FinishReason


class Scheduler:
    """Requests in, plans out, results in, outcomes out; by one thread.

    Several plans may be in flight; their results come back in the order of the plans. The runner executes plans in
    order, so a slot or lane that is given back may be handed out by the very next plan.
    """

    def __init__(self, arena: Arena, blocks: Blocks, limits: Limits, fingerprint: Fingerprint) -> None:
        assert limits.step_tokens >= limits.max_rows, limits
        self.limits = limits
        self.arena = arena
        self.blocks = blocks
        self.backlog = Backlog()
        self.counts = Counts()
        self._seating = Seating(arena, blocks, limits, self.counts)
        self._groups: dict[int, Group] = {}
        self._tenants: Counter[str] = Counter()
        """Requests that are not answered, by tenant."""
        self._deadlines: list[tuple[float, int]] = []
        self._in_flight: deque[Step] = deque()
        self._outcomes = Outcomes()
        self._commit = Commit(self, self._seating.seats, self.counts, fingerprint)
        self._next_sequence = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._seating.seated)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, parked ones included."""
        return len(self._seating.queue)

    @property
    def num_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._groups)

    @property
    def free_lanes(self) -> int:
        """Lanes that nobody holds."""
        return self._seating.seats.free_lanes

    @property
    def in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    # ------------------------------------------------------------------------------------------ requests

    def holds(self, number: int) -> bool:
        """The request is not answered yet."""
        return number in self._groups

    def submit(self, request: Request) -> None:
        """Puts a request into the queue. Refuses when the queue is full, or when it could never be run."""
        assert request.number not in self._groups, request.number
        assert request.prompt_tokens >= 1, "an empty prompt reached the scheduler"
        estimate = self._check_room(request)
        keep_block = self.blocks.acquire() if request.keep else None
        group = Group(request, estimate, keep_block)
        self._groups[request.number] = group
        self._tenants[request.tenant] += 1
        self.backlog.enter(estimate)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.number))
            if len(self._deadlines) > 2 * len(self._groups) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._groups]
                heapq.heapify(self._deadlines)
        # With a single slot the common state would have nowhere to stay: then every sample reads the prompt itself.
        if request.n > 1 and self.arena.num_slots > 1:
            group.fork = Fork()
            if request.prompt_tokens > 1:
                self._enqueue(group, TRUNK)
                return
        for index in range(request.n):
            self._enqueue(group, index)

    def cancel(self, number: int) -> None:
        """Nobody waits for the request any more: its rows are out of the next plan. Unknown numbers are ignored."""
        group = self._groups.get(number)
        if group is None:
            return
        for index in sorted(group.unfinished):
            self._outcomes.finished.append(self._commit.cancelled(group.request, index, group.live.get(index)))
        self._drop(group)

    def fail(self, number: int, code: ErrorCode, message: str) -> None:
        """Ends a request without a result. Unknown numbers are ignored."""
        group = self._groups.get(number)
        if group is not None:
            self._outcomes.failed.append(Failure(group.request, code, message))
            self._drop(group)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Ends every request without a result."""
        for number in list(self._groups):
            self.fail(number, code, message)

    def next_deadline(self) -> float | None:
        """When the next deadline of a live request falls due."""
        while self._deadlines and self._deadlines[0][1] not in self._groups:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take(self) -> Outcomes:
        """Everything that came out since the last take."""
        outcomes, self._outcomes = self._outcomes, Outcomes()
        return outcomes

    def _check_room(self, request: Request) -> float:
        backlog, limits = self.backlog, self.limits
        estimate = backlog.estimate(request)
        if backlog.requests >= limits.max_queued_requests or (
            backlog.requests and backlog.tokens + estimate > limits.max_queued_tokens
        ):
            wait = max(backlog.wait_s, 1.0)
            message = f"the queue is full; try again in about {wait:.0f} s"
            raise Refused(ErrorCode.QUEUE_FULL, message, retry_after_s=wait)
        if request.keep and request.n != 1:
            raise Refused(ErrorCode.BAD_REQUEST, "a state can be kept only with n = 1", param="n")
        if request.keep and request.stops is not None and self.arena.num_slots < 2:
            raise Refused(ErrorCode.NOT_ENOUGH_SLOTS, "keeping a state across text stops takes two slots", param="stop")
        if request.keep and not self.blocks.free:
            raise Refused(ErrorCode.NOT_ENOUGH_MEMORY, "no host memory is left for another state", param="save_as")
        return estimate

    def _enqueue(self, group: Group, index: int, *, front: bool = False) -> None:
        self._next_sequence += 1
        sequence = Sequence(self._next_sequence, group.request, index, group.fork)
        group.live[index] = sequence
        if group.fork is not None and index != TRUNK:
            group.fork.readers.append(sequence)
        self._seating.queue.push(sequence, front=front)

    # ------------------------------------------------------------------------------------------ plan

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do (perhaps until a step in flight is committed).

        `now`: seconds on a clock that never goes back.
        """
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self.fail(self._deadlines[0][1], ErrorCode.DEADLINE, "the request's time ran out")
        step = Step(self._step + 1)
        self._seating.admit(step)
        for sequence in step.seated:
            self._started(sequence)
        self._collect_rows(step)
        for slot in step.slots:
            self.arena.release(slot)
        if not (step.rows or step.moves):
            assert not (step.seats or step.halt_sets or step.blocks), "a seat without a row or a move"
            if not self._in_flight:
                self.backlog.idle()
            return None
        self._step = step.number
        self._in_flight.append(step)
        self.counts.steps += 1
        plan = step.plan()
        if __debug__ and (step.moves or step.seats):
            plan.check()
        return plan

    def _started(self, sequence: Sequence) -> None:
        group = self._groups[sequence.request.number]
        if not group.started:
            group.started = True
            self.backlog.leave(group.estimate)

    def _collect_rows(self, step: Step) -> None:
        rows, owners = step.rows, step.owners
        readers: list[Sequence] = []
        spent: dict[str, int] = {}
        for sequence in self._seating.seated.values():
            row = sequence.row
            if row is None:
                if sequence.phase is Phase.LEAVING:
                    continue
                if self._reads_text(sequence):
                    readers.append(sequence)
                    continue
                row = self._decode_row(sequence) if sequence.phase is Phase.RUNNING else None
                if row is None:
                    continue
            elif sequence.issued >= sequence.max_tokens:
                continue
            sequence.consumed += 1
            sequence.issued += 1
            sequence.pending += 1
            tenant = sequence.request.tenant
            spent[tenant] = spent.get(tenant, 0) + 1
            rows.append(row)
            owners.append(sequence)
        if readers:
            self._share_budget(step, readers, spent)
        step.tokens = sum(spent.values())
        for tenant, tokens in spent.items():
            self._seating.queue.charge(tenant, tokens)

    def _reads_text(self, sequence: Sequence) -> bool:
        """It has known tokens to read: prompt, or, once it ended, what its kept state still lacks."""
        if sequence.phase is Phase.KEEPING:
            return not sequence.pending and not sequence.keep_read
        return sequence.consumed < sequence.total_prompt

    def _decode_row(self, sequence: Sequence) -> Row | None:
        if sequence.paused or sequence.issued >= sequence.max_tokens:
            return None
        if sequence.spare_wanted:
            if not self._seating.seats.take_spare(sequence):
                self.counts.spare_waits += 1
                return None
            sequence.candidate_consumed = sequence.committed
            assert sequence.candidate is not None
            sequence.reads = sequence.candidate
        assert sequence.slot is not None
        pause = sequence.halts and sequence.matcher is not None and sequence.matcher.alive
        row = Row(
            sequence.number,
            sequence.reads,
            sequence.slot,
            sequence.lane,
            feed=True,
            sample=True,
            go=sequence.go,
            pause=pause,
            adapter=sequence.request.adapter,
        )
        if not (sequence.go or pause or sequence.spare_wanted):
            sequence.row = row
        sequence.reads = sequence.slot
        sequence.paused, sequence.go, sequence.spare_wanted, sequence.unread = pause, False, False, False
        return row

    def _share_budget(self, step: Step, readers: list[Sequence], spent: dict[str, int]) -> None:
        """Shares what the decode rows left among the rows that read: the shortest first, each at most an equal part of
        the rest. A first row of one token (every fork's) is never put off: `step_tokens` has room for a token a row."""
        left = self.limits.step_tokens - len(step.rows)
        ends = [s.keep_to if s.phase is Phase.KEEPING else s.total_prompt for s in readers]
        if step.rows:
            short = sum(end - sequence.consumed == 1 for end, sequence in zip(ends, readers, strict=True))
            left = min(left, max(self.limits.mixed_tokens, 2 * len(step.rows)) + short)
        order = sorted(range(len(readers)), key=lambda i: (ends[i] - readers[i].consumed, readers[i].number))
        for place, index in enumerate(order):
            sequence = readers[index]
            todo = ends[index] - sequence.consumed
            if todo == 0:
                self._read_kept(sequence, step)
                continue
            take = min(todo, self.limits.chunk_tokens, max(left // (len(order) - place), 1), left)
            if take <= 0:
                break
            left -= take
            self._read_row(sequence, step, take, last=take == todo)
            tenant = sequence.request.tenant
            spent[tenant] = spent.get(tenant, 0) + take

    def _read_row(self, sequence: Sequence, step: Step, take: int, *, last: bool) -> None:
        assert sequence.slot is not None
        keeping = sequence.phase is Phase.KEEPING
        sample = last and not keeping and sequence.index != TRUNK and sequence.max_tokens > 0
        step.rows.append(
            Row(
                sequence.number,
                sequence.reads,
                sequence.slot,
                NO_LANE if keeping else sequence.lane,
                tokens=sequence.ids(sequence.consumed, sequence.consumed + take),
                sample=sample,
                adapter=sequence.request.adapter,
            )
        )
        step.owners.append(sequence)
        sequence.reads = sequence.slot
        sequence.unread = False
        sequence.consumed += take
        sequence.pending += 1
        if sample:
            sequence.issued += 1
        if not keeping:
            self.counts.prompt_tokens += take
        if last and sequence.index == TRUNK:
            self._seating.end_trunk(sequence)
            group = self._groups[sequence.request.number]
            del group.live[TRUNK]
            for index in reversed(range(sequence.request.n)):
                self._enqueue(group, index, front=True)

    def _read_kept(self, sequence: Sequence, step: Step) -> None:
        """The kept state is complete: read it to the host and give its slot away."""
        group = self._groups[sequence.request.number]
        assert sequence.slot is not None and group.keep_block is not None
        step.moves.append(Read(sequence.slot, group.keep_block))
        step.kept.append(sequence)
        sequence.keep_read = True

    # ------------------------------------------------------------------------------------------ commit

    def commit(self, result: StepResult, now: float) -> None:
        """Takes the result of the oldest plan in flight."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"result of step {result.step}, expected {step.number}"
        assert len(result.flags) == len(result.tokens) == len(step.owners), (len(result.flags), len(step.owners))
        self._commit.rows(step, result, self._outcomes)
        for sequence in step.kept:
            if sequence.phase is Phase.KEEPING:
                group = self._groups[sequence.request.number]
                self._outcomes.finished.append(self._commit.kept(sequence, group))
                self._end(sequence)
        for block in step.blocks:
            self.blocks.release(block)
        self.backlog.drained(step.tokens, now)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """A sample ended: report it, or keep its state first. (Called while rows are committed.)"""
        self.backlog.ended(finish.generated)
        if sequence.request.keep and finish.reason is not FinishReason.CANCELLED:
            self._seating.leave_lane(sequence)
            sequence.phase = Phase.KEEPING
            sequence.row = None
            sequence.ending = finish
            self._commit.prepare_keep(sequence, finish)
        else:
            self._outcomes.finished.append(finish)
            self._end(sequence)

    def fault(self, sequence: Sequence) -> None:
        """A row's logits are not finite: its request fails alone and nothing of it is kept."""
        self.counts.faults += 1
        self.fail(sequence.request.number, ErrorCode.NUMERICAL_ERROR, "the model produced numbers that are not finite")

    def abandon(self, code: ErrorCode, message: str) -> None:
        """The newest plan could not be run: the requests it holds fail, the others go on."""
        step = self._in_flight.pop()
        for sequence in step.owners + step.seated + step.kept:
            self.fail(sequence.request.number, code, message)
        for block in step.blocks:
            self._release_block(block)

    def _end(self, sequence: Sequence) -> None:
        group = self._groups[sequence.request.number]
        del group.live[sequence.index]
        group.unfinished.discard(sequence.index)
        self._leave(sequence)
        if not group.unfinished:
            self._drop(group)

    def _leave(self, sequence: Sequence) -> None:
        block, sequence.block = sequence.block, None
        self._seating.leave(sequence)
        if block is not None:
            self._release_block(block)

    def _drop(self, group: Group) -> None:
        """The request is answered: give back whatever it still holds."""
        for sequence in list(group.live.values()):
            self._leave(sequence)
        group.live.clear()
        if group.fork is not None:
            self._seating.drop_fork(group.fork)
            if group.fork.block is not None:
                self._release_block(group.fork.block)
                group.fork.block = None
        if group.keep_block is not None:
            self._release_block(group.keep_block)
        if group.request.origin is not None:
            self._release_block(group.request.origin.block)
        if not group.started:
            self.backlog.leave(group.estimate)
        del self._groups[group.request.number]
        tenant = group.request.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
            self._seating.queue.depart(tenant)

    def _release_block(self, block: int) -> None:
        """At once, or when the last plan in flight, which may still read or write it, is done."""
        if self._in_flight:
            self._in_flight[-1].blocks.append(block)
        else:
            self.blocks.release(block)
