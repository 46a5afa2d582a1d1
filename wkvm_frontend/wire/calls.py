"""The requests in flight on one core."""

from __future__ import annotations

from wkvm_frontend.wire.inbox import Inbox, Logprobs, Row
from wkvm_proto.columns import unpack_f32, unpack_u32
from wkvm_proto.messages import Accepted, BadFrame, Distances, Failed, Finished, States, TokenLogprobs, Tokens
from wkvm_proto.names import ErrorCode

_IDS = 2**32


class Call:
    """One Generate: where its events go, and how many samples are still alive."""

    __slots__ = ("inbox", "index", "live", "request")

    def __init__(self, request: int, samples: int, inbox: Inbox, index: int) -> None:
        self.request = request
        self.live = samples
        self.inbox = inbox
        self.index = index


class CallTable:
    """Live calls by request id. Events of unknown ids are of calls that were given up, and are dropped."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next = 1
        self.live_samples = 0

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, samples: int, inbox: Inbox, index: int) -> Call:
        """A new call with an id that no live call has."""
        while self._next in self._calls:
            self._next = (self._next + 1) % _IDS
        call = Call(self._next, samples, inbox, index)
        self._next = (self._next + 1) % _IDS
        self._calls[call.request] = call
        self.live_samples += samples
        return call

    def close(self, call: Call) -> bool:
        """Forgets the call; False when it had ended already."""
        if self._calls.pop(call.request, None) is None:
            return False
        self.live_samples -= call.live
        return True

    def accept(self, event: Accepted) -> None:
        """Hands on the news that the request is queued."""
        if call := self._calls.get(event.request):
            call.inbox.put(call.index, event)

    def finish(self, event: Finished) -> None:
        """One sample has ended; with its last sample the call."""
        call = self._calls.get(event.request)
        if call is None:
            return
        call.live -= 1
        self.live_samples -= 1
        if call.live == 0:
            del self._calls[call.request]
        call.inbox.put(call.index, event)

    def end(self, event: Failed | States | Distances) -> None:
        """The call has ended without a result, or with all of it at once."""
        call = self._calls.get(event.request)
        if call is not None and self.close(call):
            call.inbox.put(call.index, event)

    def requests(self) -> list[int]:
        """Ids of the live calls."""
        return list(self._calls)

    def fail_all(self, code: ErrorCode, message: str, retry_after_s: float) -> int:
        """Every call ends; their number."""
        calls, self._calls, self.live_samples = list(self._calls.values()), {}, 0
        for call in calls:
            call.inbox.put(call.index, Failed(call.request, code, message, retry_after_s=retry_after_s))
        return len(calls)

    def deliver(self, event: Tokens) -> list[Call]:
        """Rows to their inboxes; the calls whose inbox is full, which have been closed and told so. Raises BadFrame."""
        try:
            requests, ids = unpack_u32(event.requests), unpack_u32(event.ids)
            counts = unpack_u32(event.counts) if event.counts else None
            samples = unpack_u32(event.samples) if event.samples else None
        except ValueError:
            raise BadFrame("tokens: a column is not u32") from None
        rows = len(requests)
        total = rows if counts is None else sum(counts)
        if (counts is not None and len(counts) != rows) or (samples is not None and len(samples) != rows):
            raise BadFrame("tokens: columns of unequal length")
        if total != len(ids):
            raise BadFrame(f"tokens: {len(ids)} ids for {total}")
        logprobs = {part.row: part for part in event.logprobs}
        full: list[Call] = []
        start = 0
        for place, request in enumerate(requests):
            count = 1 if counts is None else counts[place]
            call = self._calls.get(request)
            if call is not None and count:
                tokens = ids[start : start + count].tolist() if count > 1 else [ids[start]]
                part = _unpacked(logprobs[place], count) if place in logprobs else None
                if not call.inbox.put_row(call.index, Row(0 if samples is None else samples[place], tokens, part)):
                    self.close(call)
                    full.append(call)
            start += count
        for call in full:
            message = "The reader of this stream was too slow, so it was ended."
            call.inbox.put(call.index, Failed(call.request, ErrorCode.SLOW_CONSUMER, message))
        return full


def _unpacked(part: TokenLogprobs, count: int) -> Logprobs:
    try:
        chosen = unpack_f32(part.chosen)
        top_ids, top = unpack_u32(part.top_ids), unpack_f32(part.top)
    except ValueError:
        raise BadFrame("logprobs: a column has a wrong size") from None
    if len(chosen) != count or len(top_ids) != len(top) or len(top) % count:
        raise BadFrame("logprobs: columns of unequal length")
    width = len(top) // count
    best = [
        list(zip(top_ids[row * width : (row + 1) * width], top[row * width : (row + 1) * width], strict=True))
        for row in range(count)
    ]
    return Logprobs(chosen.tolist(), best)
