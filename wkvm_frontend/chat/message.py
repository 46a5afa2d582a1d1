"""The messages of a chat as clients send them, and their canonical form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

_THOUGHT = re.compile(r"<think>?.*?</think>?", re.DOTALL)


class BadMessage(ValueError):
    """A message that cannot be used; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a content list; only text is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A call that an assistant made; `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message: text, a list of text parts, or nothing beside tool calls."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def text_of(message: ChatMessage, index: int) -> str:
    """The text of message `index`: parts joined by newlines, "" for none. Raises BadMessage for other parts."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for place, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise BadMessage(
                f"content part of type {part.type!r} is not supported: this model reads text only",
                f"messages[{index}].content[{place}]",
            )
        texts.append(part.text)
    return "\n".join(texts)


def arguments_of(call: ToolCall, param: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; none or empty text is {}. Raises BadMessage when it is not one."""
    given = call.function.arguments
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise BadMessage("the arguments of a tool call are a JSON object", param) from None


def without_thoughts(text: str) -> str:
    """An assistant's text without its closed `<think>` parts."""
    return _THOUGHT.sub("", text) if "<think" in text else text


def chain_digests(messages: Sequence[ChatMessage], texts: Sequence[str], root: bytes) -> list[bytes]:
    """16 bytes for each length of history, 0 to all messages: blake2b over the one before and the canonical message
    (outer blanks stripped, thoughts removed)."""
    digests = [hashlib.blake2b(root, digest_size=16).digest()]
    for message, text in zip(messages, texts, strict=True):
        canonical = [
            message.role,
            without_thoughts(text).strip(),
            [[call.function.name, arguments_of(call, "messages")] for call in message.tool_calls or ()],
        ]
        link = digests[-1] + msgspec.json.encode(canonical, order="deterministic")
        digests.append(hashlib.blake2b(link, digest_size=16).digest())
    return digests
