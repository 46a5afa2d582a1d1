"""Chat templates of model folders: Jinja, in a sandbox, rendered to segments."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from wkvm_frontend.chat.message import ChatMessage, arguments_of
from wkvm_frontend.chat.template import BadTemplate, ChatOptions, Segment, segmented

MAX_TEMPLATE_BYTES = 2**20
MAX_PROMPT_CHARS = 64 * 2**20
MAX_RENDER_S = 5.0


_ESCAPED_MARK = re.compile(r"\\ue00[0-3]|\\ue1[0-9a-f]{2}")


def _nonce() -> str:
    """Eight random characters of a private area, which no client can guess and no filter changes."""
    return "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(8))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every look-up and call of a template passes here, and is refused once its time is over."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self._clock = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def start_clock(self) -> None:
        self._clock.deadline = time.monotonic() + MAX_RENDER_S

    def check_clock(self) -> None:
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise BadTemplate("the chat template took too long for these messages")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_clock()
        return super().call(context, obj, *args, **kwargs)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the library

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaTemplate:
    """A template of the transformers kind. Contents stay apart from template text, so that what a user types is never
    read as a control token."""

    stop_texts: tuple[str, ...] = ()

    def __init__(self, source: str, name: str, variables: Mapping[str, str], spellings: Sequence[str]) -> None:
        """`variables`: bos_token and the like; `spellings`: control tokens of the tokenizer. Raises BadTemplate."""
        if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise BadTemplate(f"{name} is larger than {MAX_TEMPLATE_BYTES} bytes")
        self.name = name
        self.digest = hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=16).digest()
        self._variables = dict(variables)
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BadTemplate(f"{name} is not a template: {error}") from None
        longest_first = sorted(map(re.escape, spellings), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first)) if longest_first else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
    ) -> list[Segment]:
        """The prompt. Rendered once with stand-ins for the contents and once directly: where both agree the contents
        are segments of their own; where they do not, control tokens in contents are broken up and the text is one."""
        nonce = _nonce()
        mark = f"\ue002{nonce}\ue003"
        roles = [message.role for message in messages]
        stand_in = re.compile(f"\ue000{nonce}:([0-9]+)\ue001")
        stood = [f"\ue000{nonce}:{place}\ue001" if text else "" for place, text in enumerate(texts)]
        outline = self._run(messages, stood, tools, options, mark)
        direct = self._run(messages, texts, tools, options, mark)
        parts = _located(stand_in.split(outline), direct, texts)
        if parts is None:
            guarded = [self._guard(text, mark) for text in texts]
            direct = self._run(messages, guarded, tools, options, mark)
            parts = [(direct, -1)]
            if options.continue_final:
                parts = [(_cut_after(direct, guarded[-1]), -1)]
        elif options.continue_final:
            last = max((place for place, part in enumerate(parts) if part[1] == len(texts) - 1), default=None)
            if last is None:
                raise BadTemplate("the template does not show the last message, so it cannot be continued")
            parts = parts[: last + 1]
        return [
            piece
            for segment in segmented(parts, roles, ends_open=options.continue_final)
            for piece in _without_mark(segment, mark)
        ]

    def _run(
        self,
        messages: Sequence[ChatMessage],
        texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        mark: str,
    ) -> str:
        values: dict[str, Any] = {
            **self._variables,
            **options.variables,
            "messages": [
                self._view(message, text, place, mark)
                for place, (message, text) in enumerate(zip(messages, texts, strict=True))
            ],
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final,
        }
        if tools:
            values["tools"] = self._guard(list(tools), mark)
        chunks: list[str] = []
        size = 0
        self._sandbox.start_clock()
        try:
            for chunk in self._template.generate(values):
                self._sandbox.check_clock()
                size += len(chunk)
                if size > MAX_PROMPT_CHARS:
                    raise BadTemplate(f"the rendered prompt is longer than {MAX_PROMPT_CHARS} characters")
                chunks.append(chunk)
        except jinja2.exceptions.TemplateRuntimeError as error:
            raise BadTemplate(f"the model's chat template refused these messages: {str(error)[:300]}") from None
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadTemplate(
                f"the model's chat template cannot render these messages ({type(error).__name__})"
            ) from None
        return "".join(chunks)

    def _view(self, message: ChatMessage, text: str, place: int, mark: str) -> dict[str, Any]:
        """The message as templates expect it: content always text, arguments an object, absent fields absent."""
        view: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.name is not None:
            view["name"] = self._guard(message.name, mark)
        if message.tool_call_id is not None:
            view["tool_call_id"] = self._guard(message.tool_call_id, mark)
        if message.reasoning_content is not None:
            view["reasoning_content"] = self._guard(message.reasoning_content, mark)
        if message.tool_calls:
            calls = []
            for number, call in enumerate(message.tool_calls):
                arguments = arguments_of(call, f"messages[{place}].tool_calls[{number}].function.arguments")
                function = {"name": call.function.name, "arguments": arguments}
                calls.append(self._guard({"id": call.id or "", "type": "function", "function": function}, mark))
            view["tool_calls"] = calls
        return view

    def _guard(self, value: Any, mark: str) -> Any:
        """The value with every control token's spelling broken up by the mark."""
        if self._control is None:
            return value
        if isinstance(value, str):
            return self._control.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._guard(key, mark): self._guard(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guard(item, mark) for item in value]
        return value


def _located(outline: list[str], direct: str, texts: Sequence[str]) -> list[tuple[str, int]] | None:
    """The parts of `direct`, given the outline `[template, message, template, message, ..., template]`; None when the
    contents do not stand where their stand-ins did."""
    if not direct.startswith(outline[0]):
        return None
    parts = [(outline[0], -1)] if outline[0] else []
    place = len(outline[0])
    for number in range(1, len(outline), 2):
        message, after = int(outline[number]), outline[number + 1]
        for text in _variants(texts[message]):
            end = place + len(text)
            if direct.startswith(text, place) and direct.startswith(after, end):
                break
        else:
            return None
        parts += [part for part in ((text, message), (after, -1)) if part[0]]
        place = end + len(after)
    return parts if place == len(direct) else None


def _variants(text: str) -> list[str]:
    """What templates make of a content, the longest first: itself, or without blanks, or without the thought."""
    answer = text.split("</think>")[-1]
    return [text, text.rstrip(), text.lstrip(), text.strip(), answer, answer.lstrip("\n"), answer.strip()]


def _without_mark(segment: Segment, mark: str) -> list[Segment]:
    """The segment cut at every mark, which is left out."""
    if mark not in segment.text:
        return [segment]
    pieces = segment.text.split(mark)
    return [Segment(piece, segment.content) for piece in pieces[:-1]] + [segment._replace(text=pieces[-1])]


def _cut_after(text: str, last: str) -> str:
    for variant in _variants(last):
        end = text.rfind(variant) if variant else -1
        if end >= 0:
            return text[: end + len(variant)]
    raise BadTemplate("the template does not show the last message, so it cannot be continued")


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON as models were trained with it: a blank after separators, nothing escaped for HTML."""
    if isinstance(value, jinja2.Undefined):
        raise BadTemplate("the chat template used a value that these messages do not have")
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    # The marks of `_guard` stay what they are, or they could not be taken out again.
    return _ESCAPED_MARK.sub(lambda match: str(json.loads(f'"{match[0]}"')), text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateRuntimeError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)
