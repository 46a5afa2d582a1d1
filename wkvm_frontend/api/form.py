"""Server-sent events of the two generation routes: bytes built from parts made once per choice."""

from __future__ import annotations

import msgspec

from wkvm_frontend.api.choice import Choice, TokenTrace, Wanted, chat_logprobs, completion_logprobs
from wkvm_frontend.api.shapes import ChatLogprobs, StateFacts, Usage
from wkvm_frontend.chat.answer import Piece
from wkvm_frontend.text.tokenizer import Tokenizer

json_of = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
NO_USAGE = b""
NULL_USAGE = b',"usage":null'


class Answered(msgspec.Struct, frozen=True):
    """What every event of an answer says of it."""

    id: str
    created: int
    model: str


class Form:
    """Events of one kind of answer. `usage` in the methods is the end of an event: nothing, null, or figures."""

    object_name: bytes

    def __init__(self, answered: Answered, tokenizer: Tokenizer, wanted: Wanted, top_logprobs: int) -> None:
        self.answer_id = answered.id
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._top = top_logprobs
        self._open = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            json_of(answered.id), self.object_name, answered.created, json_of(answered.model),
        )  # fmt: skip
        self._heads: dict[int, bytes] = {}

    def head(self, choice: Choice) -> bytes:
        """The beginning of every event of a choice."""
        head = self._heads.get(choice.index)
        if head is None:
            head = self._heads[choice.index] = self._open + b'{"index":%d,' % choice.index
        return head

    def opening(self, choice: Choice, usage: bytes, prompt_ids: list[int] | None) -> bytes:
        """The event before the text; may be none."""
        raise NotImplementedError

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """One piece of text, with the trace of the tokens since the last event."""
        raise NotImplementedError

    def finish(self, choice: Choice, usage: bytes) -> bytes:
        """The last event of a choice."""
        raise NotImplementedError

    def usage(self, usage: Usage) -> bytes:
        """The event that tells the usage."""
        return self._open + b'],"usage":' + json_of(usage) + b"}\n\n"

    def facts(self, facts: StateFacts) -> bytes:
        """The event that tells of states."""
        return self._open + b'],"wkvm":' + json_of(facts) + b"}\n\n"

    def _trace(self, choice: Choice) -> bytes:
        if not choice.traced:
            return b',"logprobs":null'
        trace = choice.take_trace()
        logprobs = self.logprobs(trace) if self._wanted.logprobs and trace.ids else b"null"
        ids = b',"token_ids":' + json_of(trace.ids) if self._wanted.token_ids else b""
        return b',"logprobs":' + logprobs + ids

    def logprobs(self, trace: TokenTrace) -> bytes:
        """The trace as JSON in this answer's shape."""
        raise NotImplementedError


class ChatForm(Form):
    """chat.completion.chunk"""

    object_name = b"chat.completion.chunk"

    def opening(self, choice: Choice, usage: bytes, prompt_ids: list[int] | None) -> bytes:
        """The role."""
        ids = b',"prompt_token_ids":' + json_of(prompt_ids) if prompt_ids is not None else b""
        return (
            self.head(choice)
            + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            + ids
            + usage
            + b"}\n\n"
        )

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """`content` or `reasoning_content`."""
        field = b'"delta":{"reasoning_content":' if piece.thought else b'"delta":{"content":'
        trace = self._trace(choice)
        return b"".join(
            (self.head(choice), field, json_of(piece.text), b"}", trace, b',"finish_reason":null}]', usage, b"}\n\n")
        )

    def finish(self, choice: Choice, usage: bytes) -> bytes:
        """An empty delta with the reason."""
        reasons = b',"finish_reason":%b,"stop_reason":%b}]' % (
            json_of(choice.finish_reason),
            json_of(choice.stop_reason),
        )
        return b"".join((self.head(choice), b'"delta":{}', self._trace(choice), reasons, usage, b"}\n\n"))

    def logprobs(self, trace: TokenTrace) -> bytes:
        """`{"content": [...]}`"""
        return json_of(ChatLogprobs(chat_logprobs(self._tokenizer, trace)))


class CompletionForm(Form):
    """text_completion"""

    object_name = b"text_completion"

    def opening(self, choice: Choice, usage: bytes, prompt_ids: list[int] | None) -> bytes:
        """None, unless the prompt's ids are wanted."""
        if prompt_ids is None:
            return b""
        ids = b'"text":"","logprobs":null,"finish_reason":null,"prompt_token_ids":' + json_of(prompt_ids) + b"}]"
        return self.head(choice) + ids + usage + b"}\n\n"

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """`text`."""
        trace = self._trace(choice)
        return b"".join(
            (self.head(choice), b'"text":', json_of(piece.text), trace, b',"finish_reason":null}]', usage, b"}\n\n")
        )

    def finish(self, choice: Choice, usage: bytes) -> bytes:
        """No text, and the reason."""
        reasons = b',"finish_reason":%b,"stop_reason":%b}]' % (
            json_of(choice.finish_reason),
            json_of(choice.stop_reason),
        )
        return b"".join((self.head(choice), b'"text":""', self._trace(choice), reasons, usage, b"}\n\n"))

    def logprobs(self, trace: TokenTrace) -> bytes:
        """`{"tokens": [...], ...}`"""
        return json_of(completion_logprobs(self._tokenizer, trace, top=self._top > 0))
