"""One sample of an answer: its ids to text, with what the client asked to see beside the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wkvm_frontend.api.shapes import CompletionLogprobs, TokenLogprob, TopLogprob
from wkvm_frontend.chat.answer import Answer, Phase, Piece
from wkvm_frontend.text.detokenizer import Detokenizer
from wkvm_frontend.text.tokenizer import Tokenizer, token_name
from wkvm_frontend.wire.inbox import Row
from wkvm_proto.messages import Finished
from wkvm_proto.names import FinishReason

LEAST_LOGPROB = -9999.0


class Wanted(msgspec.Struct, frozen=True):
    """What the client asked to see beside the text."""

    token_ids: bool = False
    logprobs: bool = False
    shown_stops: frozenset[bytes] = frozenset()
    """Stop strings to show at the end of the text."""
    show_stop_ids: bool = False


class TokenTrace(msgspec.Struct):
    """Tokens whose text, if any, is shown at the same time."""

    ids: list[int] = []
    offsets: list[int] = []
    """Characters of text before each token."""
    chosen: list[float] = []
    best: list[list[tuple[int, float]]] = []


class Choice:
    """The text of one sample as it grows. `phase` None: text is exact, as completions promise; otherwise a chat's
    answer, thoughts apart and without outer blanks."""

    __slots__ = (
        "_answer", "_chars", "_detokenizer", "_tokenizer", "_wanted", "finish_reason", "generated_tokens", "index",
        "saved_as", "stop_reason", "trace",
    )  # fmt: skip

    def __init__(self, index: int, tokenizer: Tokenizer, phase: Phase | None, wanted: Wanted) -> None:
        self.index = index
        self.generated_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.saved_as = ""
        """Handle of the state that was kept at the end."""
        self.trace = TokenTrace()
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.table)
        self._answer = None if phase is None else Answer(phase)
        self._chars = 0

    @property
    def traced(self) -> bool:
        """Whether the client wants ids or log-probabilities."""
        return self._wanted.token_ids or self._wanted.logprobs

    def feed(self, token: int) -> list[Piece]:
        """The text that the token makes visible."""
        self.generated_tokens += 1
        text = self._detokenizer.feed(token)
        if self._answer is not None:
            return self._answer.feed(text) if text else []
        return [Piece(text, False)] if text else []

    def feed_traced(self, row: Row, place: int) -> list[Piece]:
        """As `feed`, for token `place` of the row, which is added to the trace."""
        token, trace = row.ids[place], self.trace
        trace.ids.append(token)
        trace.offsets.append(self._chars)
        if row.logprobs is not None:
            trace.chosen.append(row.logprobs.chosen[place])
            trace.best.append(row.logprobs.best[place])
        pieces = self.feed(token)
        self._chars += sum(len(piece.text) for piece in pieces)
        return pieces

    def finish(self, event: Finished) -> list[Piece]:
        """The last text. `finish_reason` and `stop_reason` are set from here on."""
        self.generated_tokens = event.generated_tokens
        self.saved_as = event.saved_as
        self.finish_reason = "length" if event.reason is FinishReason.LENGTH else "stop"
        tail = event.tail
        if event.reason is FinishReason.STOP_TEXT:
            self.stop_reason = event.stop_text.decode("utf-8", "replace")
            if event.stop_text in self._wanted.shown_stops:
                tail += event.stop_text
        elif event.reason is FinishReason.STOP_TOKEN and event.stop_id >= 0:
            self.stop_reason = event.stop_id
            if self._wanted.show_stop_ids:
                tail += self._tokenizer.table[event.stop_id]
        text = self._detokenizer.finish(tail)
        if self._answer is None:
            return [Piece(text, False)] if text else []
        return [*(self._answer.feed(text) if text else []), *self._answer.finish()]

    def take_trace(self) -> TokenTrace:
        """The tokens since the last call."""
        trace, self.trace = self.trace, TokenTrace()
        return trace


def chat_logprobs(tokenizer: Tokenizer, trace: TokenTrace) -> list[TokenLogprob]:
    """The trace in the shape of chat completions."""
    return [
        TokenLogprob(
            token_name(tokenizer, token),
            finite(chosen),
            _bytes(tokenizer, token),
            [TopLogprob(token_name(tokenizer, each), finite(value), _bytes(tokenizer, each)) for each, value in best],
        )
        for token, chosen, best in zip(trace.ids, trace.chosen, trace.best, strict=True)
    ]


def completion_logprobs(tokenizer: Tokenizer, trace: TokenTrace, *, top: bool) -> CompletionLogprobs:
    """The trace in the shape of completions; the chosen token is among the best."""
    names = [token_name(tokenizer, token) for token in trace.ids]
    best = None
    if top:
        best = [
            {token_name(tokenizer, each): finite(value) for each, value in row} | {name: finite(chosen)}
            for name, chosen, row in zip(names, trace.chosen, trace.best, strict=True)
        ]
    return CompletionLogprobs(names, [finite(value) for value in trace.chosen], best, trace.offsets)


def finite(value: float) -> float:
    """A log-probability that JSON can carry: minus infinity and NaN become -9999."""
    return value if math.isfinite(value) else LEAST_LOGPROB


def _bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    piece: Sequence[int] = tokenizer.table[token]
    return list(piece) or None
