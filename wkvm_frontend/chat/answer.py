"""Generated text of a chat, taken apart: thoughts and the visible answer, neither with outer blanks."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Phase(Enum):
    """Where in its thoughts an answer stands."""

    UNDECIDED = "may open a thought"
    OPENING = "inside the opening tag, whose bracket is still to come"
    THINKING = "inside a thought"
    CLOSING = "inside the closing tag, whose bracket is still to come"
    ANSWERING = "thoughts are over"


class Piece(NamedTuple):
    """Text to show now."""

    text: str
    thought: bool


class OuterBlanks:
    """Text without its leading blanks, and with trailing ones held back until more text follows."""

    __slots__ = ("_begun", "_held")

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be shown."""
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._begun = True
        if self._held:
            text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


class Answer:
    """A growing answer. Once thoughts are over, a `<think>` in the text is text."""

    __slots__ = ("_answer", "_held", "_thought", "phase")

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self._held = ""
        self._thought = OuterBlanks()
        self._answer = OuterBlanks()

    def feed(self, text: str) -> list[Piece]:
        """What may be shown now: at most one piece of thought, then one of answer; empty ones are left out."""
        if self.phase is Phase.ANSWERING:
            shown = self._answer.feed(text)
            return [Piece(shown, False)] if shown else []
        return self._split(self._held + text, last=False)

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing follows. Blanks at the end are dropped."""
        return self._split(self._held, last=True) if self._held else []

    def _split(self, text: str, *, last: bool) -> list[Piece]:
        out: list[Piece] = []
        self._held = ""
        if self.phase is Phase.UNDECIDED:
            bare = text.lstrip()
            if bare.startswith(OPEN):
                self.phase, text = Phase.THINKING, bare[len(OPEN) :]
            elif OPEN.startswith(bare) and not last:
                self._held = text
                return out
            else:
                self.phase = Phase.ANSWERING
        if self.phase in (Phase.OPENING, Phase.CLOSING) and text:
            following = Phase.THINKING if self.phase is Phase.OPENING else Phase.ANSWERING
            self.phase, text = following, text.removeprefix(">")
        if self.phase is Phase.THINKING:
            thought, closed, text = text.partition(CLOSE)
            if closed:
                self.phase = Phase.ANSWERING
            elif not last:
                keep = _overlap(thought, CLOSE)
                self._held = thought[len(thought) - keep :]
                thought = thought[: len(thought) - keep]
            if shown := self._thought.feed(thought):
                out.append(Piece(shown, True))
        if self.phase is Phase.ANSWERING and (shown := self._answer.feed(text)):
            out.append(Piece(shown, False))
        return out


def phase_after(prompt_end: str, *, continued: bool) -> Phase:
    """How an answer begins after a prompt that ends so; `continued`: inside a visible answer."""
    end = prompt_end.rstrip()
    for tag, phase in (
        (CLOSE, Phase.ANSWERING),
        (CLOSE[:-1], Phase.CLOSING),
        (OPEN, Phase.THINKING),
        (OPEN[:-1], Phase.OPENING),
    ):
        if end.endswith(tag):
            return phase
    return Phase.ANSWERING if continued else Phase.UNDECIDED


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
