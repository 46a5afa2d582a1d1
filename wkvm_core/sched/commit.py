"""What the results of a step mean: tokens to deliver, text stops, ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from wkvm_core.sched.counts import Counts
from wkvm_core.sched.group import Group
from wkvm_core.sched.outcomes import Finish, Outcomes
from wkvm_core.sched.plan import EXHAUSTED, FAULT, HALTED, RAN, STOPPED, StepResult
from wkvm_core.sched.request import Request
from wkvm_core.sched.seats import Seats
from wkvm_core.sched.sequence import Phase, Sequence
from wkvm_core.sched.step import Step
from wkvm_core.sched.stops import Match
from wkvm_core.state.cursor import Cursor
from wkvm_core.state.layout import Fingerprint
from wkvm_core.state.snapshot import Segment, Snapshot
from wkvm_proto.names import FinishReason


class Ends(Protocol):
    """Who is told that a sequence ended."""

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """In good order."""

    def fault(self, sequence: Sequence) -> None:
        """By a numerical fault."""


class Commit:
    """Reads results into sequences. Tokens are delivered once no text stop can take them back."""

    def __init__(self, ends: Ends, seats: Seats, counts: Counts, fingerprint: Fingerprint) -> None:
        self._ends = ends
        self._seats = seats
        self._counts = counts
        self._fingerprint = fingerprint

    def rows(self, step: Step, result: StepResult, outcomes: Outcomes) -> None:
        """All rows of a step, in order."""
        owners_out, ids_out = outcomes.owners, outcomes.ids
        logprobs = result.logprobs
        generated = 0
        for index, (sequence, row, flags, token) in enumerate(
            zip(step.owners, step.rows, result.flags, result.tokens, strict=True)
        ):
            sequence.pending -= 1
            if sequence.phase is Phase.DONE:
                continue
            if flags != RAN:
                if flags & FAULT:
                    self._ends.fault(sequence)
                    continue
                if not flags & RAN:  # the lane was halted or done when the step began: the row did nothing
                    if sequence.phase is not Phase.KEEPING:
                        sequence.consumed -= 1
                        sequence.issued -= 1
                    continue
            if not row.sample:
                if sequence.max_tokens == 0 and sequence.consumed == sequence.total_prompt and not sequence.pending:
                    self._end(sequence, FinishReason.LENGTH)
                continue
            generated += 1
            sequence.output.append(token)
            if logprobs and index in logprobs:
                sequence.held_logprobs.append(logprobs[index])
            if sequence.matcher is None and not sequence.held_logprobs:
                if not flags & STOPPED:
                    sequence.delivered += 1
                    owners_out.append(sequence.owner)
                    ids_out.append(token)
                if flags & (STOPPED | EXHAUSTED):
                    self._end(sequence, FinishReason.STOP_TOKEN if flags & STOPPED else FinishReason.LENGTH)
            else:
                self._read_token(sequence, token, flags, outcomes)
        self._counts.generated_tokens += generated

    def _read_token(self, sequence: Sequence, token: int, flags: int, outcomes: Outcomes) -> None:
        """The slower way: text stops or log-probabilities."""
        matcher = sequence.matcher
        last = len(sequence.output) - 1
        match = None
        if flags & STOPPED:
            self._deliver(sequence, last, outcomes)
            self._end(sequence, FinishReason.STOP_TOKEN)
            return
        if matcher is not None and last >= sequence.request.sampling.min_tokens:
            match = matcher.push(token)
        if match is not None:
            assert matcher is not None
            kept = matcher.clear_tokens(match.start)
            self._deliver(sequence, kept, outcomes)
            self._end(sequence, FinishReason.STOP_TEXT, match, kept)
            return
        if flags & EXHAUSTED:
            self._deliver(sequence, last + 1, outcomes)
            self._end(sequence, FinishReason.LENGTH)
            return
        clear = matcher.clear_tokens() if matcher is not None and last >= matcher.first else last + 1
        self._deliver(sequence, clear, outcomes)
        if flags & HALTED:
            self._decide(sequence, clear, last)
        else:
            assert not (sequence.halts and clear <= last), f"sequence {sequence.number} ran on inside a possible stop"

    def _decide(self, sequence: Sequence, clear: int, last: int) -> None:
        """The row halted and no stop is complete: it goes on. The state before the first token of a possible stop is
        kept as the candidate until the stop is complete or impossible."""
        self._counts.halts += 1
        sequence.paused = False
        sequence.row = None
        sequence.go = True
        if clear > last:
            sequence.spare_wanted = False
            self._seats.drop_candidate(sequence)
        elif clear == last:  # the possible stop begins in the token just sampled: the slot holds the state before it
            self._seats.drop_candidate(sequence)
            sequence.spare_wanted = True
        else:
            assert sequence.candidate is not None, f"sequence {sequence.number}: a stop's start was overwritten"

    def _deliver(self, sequence: Sequence, end: int, outcomes: Outcomes) -> None:
        for place in range(sequence.delivered, end):
            if sequence.held_logprobs:
                outcomes.logprobs[len(outcomes.ids)] = sequence.held_logprobs.pop(0)
            outcomes.owners.append(sequence.owner)
            outcomes.ids.append(sequence.output[place])
        sequence.delivered = max(sequence.delivered, end)

    def prepare_keep(self, sequence: Sequence, finish: Finish) -> None:
        """An ended sequence's state is kept: which slot it lies in, what it has consumed, what it still has to read.

        A stop's own tokens are not read; after the end by length the last token is.
        """
        committed = max(sequence.committed, sequence.total_prompt)
        sequence.consumed, sequence.keep_to = committed, committed
        if finish.reason is FinishReason.LENGTH:
            sequence.keep_to = sequence.total_prompt + len(sequence.output)
        elif finish.reason is FinishReason.STOP_TEXT:
            sequence.keep_to = sequence.total_prompt + finish.delivered
            if sequence.keep_to < committed:
                self._seats.return_to_candidate(sequence)
                sequence.consumed = sequence.candidate_consumed
        assert sequence.consumed <= sequence.keep_to, f"sequence {sequence.number}: its kept state was overwritten"
        self._seats.drop_candidate(sequence)
        assert sequence.slot is not None
        sequence.reads = sequence.slot

    def kept(self, sequence: Sequence, group: Group) -> Finish:
        """The state of an ended sequence lies in the group's keep block, which the snapshot takes over."""
        finish, block, origin = sequence.ending, group.keep_block, sequence.request.origin
        assert finish is not None and block is not None
        group.keep_block = None
        consumed = _origin_tokens(sequence.request) + sequence.keep_to
        segment = Segment(sequence.ids(0, sequence.keep_to), origin.segment if origin is not None else None)
        # Ids left out before this turn cannot be made up for: then the whole chain has none.
        without_ids = origin is not None and origin.segment is None
        snapshot = Snapshot(block, Cursor(consumed, finish.tail), self._fingerprint, None if without_ids else segment)
        return replace(finish, consumed=consumed, snapshot=snapshot)

    def cancelled(self, request: Request, index: int, sequence: Sequence | None) -> Finish:
        """The report of a sample that nobody waits for; None: it had not begun."""
        return Finish(
            request=request,
            sample=index,
            reason=FinishReason.CANCELLED,
            generated=len(sequence.output) if sequence is not None else 0,
            delivered=sequence.delivered if sequence is not None else 0,
            consumed=_origin_tokens(request) + (sequence.consumed if sequence is not None else 0),
        )

    def _end(
        self, sequence: Sequence, reason: FinishReason, match: Match | None = None, kept: int | None = None
    ) -> None:
        tail = stop_text = b""
        if match is not None and kept is not None:
            assert sequence.matcher is not None
            stop_text = match.text
            tail = sequence.matcher.tail(match, sequence.output[kept])
        self._ends.finish(
            sequence,
            Finish(
                request=sequence.request,
                sample=sequence.index,
                reason=reason,
                generated=len(sequence.output),
                delivered=sequence.delivered,
                consumed=_origin_tokens(sequence.request) + max(sequence.committed, sequence.total_prompt),
                tail=tail,
                stop_text=stop_text,
                stop_id=sequence.output[-1] if reason is FinishReason.STOP_TOKEN else -1,
            ),
        )


def _origin_tokens(request: Request) -> int:
    return request.origin.cursor.tokens if request.origin is not None else 0
