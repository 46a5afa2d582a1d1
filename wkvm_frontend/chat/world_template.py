"""The chat format of RWKV World and G1 models, used where a model folder has no template."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from wkvm_frontend.chat.message import ChatMessage, arguments_of, without_thoughts
from wkvm_frontend.chat.template import ChatOptions, Segment, Template, segmented

_NEWLINES = re.compile(r"\n{2,}")
_SPEAKERS = {"system": "System:", "developer": "System:", "assistant": "Assistant:"}


class WorldTemplate:
    """`User: ...\\n\\nAssistant: ...`: a blank line is the only turn marker, so none may be inside what users and
    systems say.

    Thoughts: opened by `<think` without its bracket when asked for (`enable_thinking`, or a `reasoning_effort` of low
    and above), skipped by an empty one with `reasoning_effort` minimal; otherwise the format says nothing of them.
    """

    name = "built-in:rwkv-world"
    digest = hashlib.blake2b(b"rwkv-world-1", digest_size=16).digest()
    stop_texts: tuple[str, ...] = ("\n\nUser:",)

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
    ) -> list[Segment]:
        """The prompt. Tools are not rendered: the format knows none."""
        parts: list[tuple[str, int]] = []
        written = 0
        for place, (message, given) in enumerate(zip(messages, texts, strict=True)):
            text = _canonical(message, given, place)
            if not text and message.role == "assistant":
                continue  # an answer that was stopped before its first token
            border = "\n\n" if written else ""
            parts.append((border + _SPEAKERS.get(message.role, "User:") + (" " if text else ""), -1))
            if text:
                parts.append((text, place))
            written += 1
        if options.continue_final:
            return segmented(parts, [message.role for message in messages], ends_open=True)
        if options.add_generation_prompt:
            parts.append((("\n\n" if written else "") + "Assistant:" + _thought(options), -1))
        else:
            parts.append(("\n\n", -1))
        return segmented(parts, [message.role for message in messages], ends_open=False)


class SqueezedTemplate:
    """A template of a model whose turns are marked by blank lines alone: none is let into what users, systems and
    tools say."""

    def __init__(self, inner: Template) -> None:
        self.name = inner.name
        self.digest = inner.digest
        self.stop_texts = inner.stop_texts
        self._inner = inner

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
    ) -> list[Segment]:
        """The inner template's prompt of the squeezed texts."""
        plain = [
            text if message.role == "assistant" else squeezed(text)
            for message, text in zip(messages, texts, strict=True)
        ]
        return self._inner.render(messages, plain, tools, options)


def squeezed(text: str) -> str:
    """Text without blank lines, carriage returns and outer blanks: it cannot forge a turn."""
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


def _canonical(message: ChatMessage, text: str, place: int) -> str:
    if message.role != "assistant":
        return squeezed(text)
    calls = [
        msgspec.json.encode(
            {"name": call.function.name, "arguments": arguments_of(call, f"messages[{place}].tool_calls[{number}]")}
        ).decode()
        for number, call in enumerate(message.tool_calls or ())
    ]
    return "\n".join([part for part in (without_thoughts(text).strip(), *calls) if part])


def _thought(options: ChatOptions) -> str:
    effort = options.variables.get("reasoning_effort")
    wanted = options.variables.get("enable_thinking")
    if wanted is False or effort == "none":
        return ""
    if effort == "minimal":
        return " <think>\n</think"
    return " <think" if wanted or effort is not None else ""
