"""An answer sent when it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from wkvm_frontend.api.choice import Choice
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.shapes import StateFacts, Usage, usage_of
from wkvm_frontend.failure import from_core, internal_error
from wkvm_frontend.wire.inbox import Row
from wkvm_proto.messages import Failed, Finished
from wkvm_proto.names import FinishReason


class WholeText:
    """The text of one choice."""

    def __init__(self) -> None:
        self._answer: list[str] = []
        self._thought: list[str] = []

    def add(self, text: str, *, thought: bool) -> None:
        """One more piece."""
        (self._thought if thought else self._answer).append(text)

    @property
    def answer(self) -> str:
        """What is to be shown."""
        return "".join(self._answer)

    @property
    def thought(self) -> str | None:
        """The thoughts; None when there were none."""
        return "".join(self._thought) or None


async def collect(generation: Generation, choices: Sequence[Choice], samples: int) -> list[WholeText]:
    """The text of every choice, once all have finished. Raises ApiError, ClientGone."""
    texts = [WholeText() for _ in choices]
    unfinished = len(choices)
    while unfinished:
        for call, item in await generation.take():
            if isinstance(item, Failed):
                raise from_core(item)
            if not isinstance(item, Row | Finished):
                continue
            place = call * samples + item.sample
            if place >= len(choices):
                raise internal_error()
            choice = choices[place]
            if isinstance(item, Row):
                for number, token in enumerate(item.ids):
                    for piece in choice.feed_traced(item, number) if choice.traced else choice.feed(token):
                        texts[place].add(piece.text, thought=piece.thought)
                continue
            if item.reason is FinishReason.CANCELLED:
                raise internal_error()
            unfinished -= 1
            for piece in choice.finish(item):
                texts[place].add(piece.text, thought=piece.thought)
    return texts


def state_facts(generation: Generation, choices: Sequence[Choice]) -> StateFacts | None:
    """What to tell of states; None when the request named none."""
    saved = choices[0].saved_as
    if not saved and generation.reuse != "state":
        return None
    grade = "invariant" if generation.is_invariant else "bounded"
    return StateFacts(generation.reuse, generation.cached_tokens, grade, saved)


def total_usage(generation: Generation, choices: Sequence[Choice]) -> Usage:
    """Prompt tokens once a prompt, completion tokens of all choices."""
    generated = sum(choice.generated_tokens for choice in choices)
    return usage_of(generation.prompt_tokens, generated, generation.cached_tokens)
