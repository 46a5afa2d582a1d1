"""What a chat template gives: a prompt in segments, and the borders between messages."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from wkvm_frontend.chat.message import ChatMessage
from wkvm_frontend.text.tokenizer import Tokenizer
from wkvm_proto.messages import MAX_JUNCTIONS, Junction

Scalar: TypeAlias = str | int | float | bool | None


class BadTemplate(Exception):
    """A template that cannot be used or has failed; the message may be shown to a caller."""


class Segment(NamedTuple):
    """Text tokenised on its own. `content`: a message's text, where no control token may be spelled; otherwise the
    template's. `messages`: how many messages are wholly read at its end, -1 when this border is no junction."""

    text: str
    content: bool
    messages: int = -1


class ChatOptions(msgspec.Struct, frozen=True):
    """How to render: `add_generation_prompt` opens the assistant's turn; `continue_final` leaves the last message,
    the assistant's, open."""

    add_generation_prompt: bool = True
    continue_final: bool = False
    variables: dict[str, Scalar] = {}
    """Allowed template variables, `enable_thinking` and `reasoning_effort` among them."""


class Template(Protocol):
    """A model's chat format."""

    @property
    def name(self) -> str:
        """Where it comes from, for /v1/models."""

    @property
    def digest(self) -> bytes:
        """Binds history hashes to this template."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Text that ends an assistant's turn in this format."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
    ) -> list[Segment]:
        """The prompt; `texts[i]` is the text of `messages[i]`. Raises BadTemplate."""


def segmented(parts: Sequence[tuple[str, int]], roles: Sequence[str], *, ends_open: bool) -> list[Segment]:
    """Segments of `(text, message index or -1 for template text)` in order.

    A blank before a content joins the content, as texts are tokenised in training. Junctions: the end of an
    assistant's content, and for other messages the end of the template text after them.
    """
    out: list[Segment] = []
    before = -1  # message whose content came last
    for place, (text, message) in enumerate(parts):
        if message >= 0:
            blanks = ""
            if out and not out[-1].content:
                bare = out[-1].text.rstrip(" ")
                blanks = out[-1].text[len(bare) :]
                out[-1] = out[-1]._replace(text=bare)
            out.append(Segment(blanks + text, True, message + 1 if roles[message] == "assistant" else -1))
            before = message
            continue
        after = next((index for _, index in parts[place + 1 :] if index >= 0), None)
        if after is None:
            junction = len(roles) if place == len(parts) - 1 and not ends_open else -1
        else:
            junction = after if before >= 0 and roles[before] != "assistant" else -1
        out.append(Segment(text, False, junction))
    return [segment for segment in out if segment.text]


def tokenise(
    segments: Sequence[Segment], tokenizer: Tokenizer, digests: Sequence[bytes], *, first: bool = True
) -> tuple[array[int], tuple[Junction, ...]]:
    """u32 ids of the prompt, each segment on its own, and the junctions with the digest of the messages before. first:
    the prompt begins a text."""
    ids: array[int] = array("I")
    junctions: dict[int, Junction] = {}
    for place, segment in enumerate(segments):
        ids.extend(tokenizer.encode(segment.text, specials=not segment.content, first=first and place == 0))
        if segment.messages >= 0:
            junctions[len(ids)] = Junction(len(ids), digests[segment.messages])
    return ids, tuple(junctions.values())[-MAX_JUNCTIONS:]


def is_prefix_stable(template: Template, tokenizer: Tokenizer) -> bool:
    """Whether a longer conversation begins with the tokens of the shorter one, at every junction of it: what makes
    a kept state useful for the next turn."""
    said = ["Where is it?", "It is here.\n\nLook.", "And now?", "Now it is there.", "Thanks."]
    messages = [
        ChatMessage(role="user" if place % 2 == 0 else "assistant", content=text) for place, text in enumerate(said)
    ]
    digests = [bytes([count]) * 16 for count in range(len(said) + 1)]
    shorter: tuple[array[int], tuple[Junction, ...]] | None = None
    for count in (1, 3, 5):
        try:
            segments = template.render(messages[:count], said[:count], [], ChatOptions())
        except BadTemplate:
            return False
        prompt = tokenise(segments, tokenizer, digests)
        if shorter is not None and any(
            prompt[0][: junction.end] != shorter[0][: junction.end] or junction not in prompt[1]
            for junction in shorter[1]
        ):
            return False
        shorter = prompt
    return shorter is not None and len(shorter[1]) >= len(said)
