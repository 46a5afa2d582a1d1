"""One streamed answer, read for its timing: events are counted by a pattern, never parsed."""

from __future__ import annotations

import re
from array import array

import msgspec

# An event that brings text. In JSON a quote inside text is escaped, so text cannot look like a key.
_TEXT = re.compile(rb'"(?:content|reasoning_content|text)": ?"(?!")')
_ERROR = re.compile(rb'(?:^|\n)data: ?\{"error"')
_END = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')
MAX_ERROR_BYTES = 4096


class Answer:
    """Grows with the bytes of an event stream. Moments are seconds of one clock."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.first = 0.0
        self.last = 0.0
        self.events = 0
        """Those with text."""
        self.gaps = array("f")
        self.prompt_tokens = 0
        self.completion_tokens = 0
        """As the server counts them; 0 until it says so."""
        self.ended = False
        """The stream's end marker came."""
        self.error = b""
        """The line of an error event."""
        self._rest = b""
        self._kept: list[bytes] | None = [] if keep_text else None

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the stream that arrived at `now`."""
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if not end:
            return
        lines = data[:end] if self._rest else data
        count = len(_TEXT.findall(lines))
        if count:
            if self.events:
                self.gaps.append(now - self.last)
            else:
                self.first = now
            if count > 1:  # tokens that arrived together
                self.gaps.extend((0.0,) * (count - 1))
            self.last = now
            self.events += count
        if b'"completion_tokens"' in lines:
            self._read_usage(lines)
        if b'{"error"' in lines and _ERROR.search(lines):
            self.error = lines[:MAX_ERROR_BYTES]
        if b"[DONE]" in lines and _END.search(lines):
            self.ended = True
        if self._kept is not None:
            self._kept.append(lines)

    @property
    def tokens(self) -> int:
        """Generated."""
        return self.completion_tokens or self.events

    def text(self) -> str:
        """The whole text; only of an answer made to keep it."""
        assert self._kept is not None, "the text was not kept"
        lines = b"".join(self._kept).split(b"\n")
        events = [line[5:] for line in lines if line.startswith(b"data:") and not _END.match(line)]
        choices = [choice for event in events for choice in msgspec.json.decode(event, type=_Event).choices]
        return "".join(choice.text or choice.delta.content or "" for choice in choices)

    def _read_usage(self, lines: bytes) -> None:
        completion, prompt = _COMPLETION_TOKENS.findall(lines), _PROMPT_TOKENS.findall(lines)
        self.completion_tokens = int(completion[-1]) if completion else self.completion_tokens
        self.prompt_tokens = int(prompt[-1]) if prompt else self.prompt_tokens


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = _Delta()


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
