"""POST /tokenize, /detokenize and /v1/chat/render: what the model reads, without running it."""

from __future__ import annotations

import asyncio
from array import array
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.chat import MAX_MESSAGES, OFFLOAD_BYTES, ChatFields, prompt_of
from wkvm_frontend.api.fields import TokenId, check_token
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.chat.message import ChatMessage
from wkvm_frontend.failure import bad_request
from wkvm_frontend.served import ServedModel
from wkvm_frontend.text.tokenizer import decode, token_name


class TokenizeFields(ChatFields, frozen=True, kw_only=True):
    """Text as `prompt` (or `content`), or a chat's `messages`."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] = msgspec.field(default_factory=list)
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own leading ids come first; they do unless false."""
    parse_special: bool | None = None
    """Whether the spelling of a control token becomes that token, as in a completion's prompt; it does unless
    false."""
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ids and their number."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeFields(msgspec.Struct, frozen=True):
    """Token ids."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Their text; bytes that are not UTF-8 are U+FFFD. `content` is the same again."""

    prompt: str
    content: str


class RenderedSegment(msgspec.Struct, frozen=True):
    """A part of the prompt that is tokenised on its own; `content`: no control token can be spelled in it."""

    text: str
    content: bool


class RenderedJunction(msgspec.Struct, frozen=True):
    """A border between messages: tokens before it, and the hash of the messages before it in hex."""

    end: int
    digest: str


class RenderAnswer(msgspec.Struct, frozen=True):
    """A chat as the model reads it."""

    prompt: str
    token_ids: list[int]
    count: int
    segments: list[RenderedSegment]
    junctions: list[RenderedJunction]


def _model(service: Service, name: str | None) -> ServedModel:
    model = service.fleet.pick(name).model
    assert model is not None, "a ready core has a model"
    return model


class TokenizeRoute:
    """Text or messages to ids."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(TokenizeFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        body, size = await self._bodies.read(scope, receive)
        model = _model(self._service, body.model)
        text = body.prompt if body.prompt is not None else body.content
        if text is not None and body.messages:
            raise bad_request("prompt: not together with messages.", "prompt")
        if text is not None:
            if size > OFFLOAD_BYTES:
                ids = await asyncio.to_thread(_encode, model, text, body)
            else:
                ids = _encode(model, text, body)
        elif body.messages:
            ids = (await prompt_of(body, model, size)).ids
        else:
            raise bad_request("prompt: give a text, or messages.", "prompt")
        names = [token_name(model.tokenizer, token) for token in ids] if body.return_token_strs else None
        await send_json(send, TokenizeAnswer(ids.tolist(), len(ids), model.card.max_prompt_tokens, names))


def _encode(model: ServedModel, text: str, body: TokenizeFields) -> array[int]:
    ids = array("I", model.tokenizer.lead if body.add_special_tokens is not False else ())
    ids.extend(model.tokenizer.encode(text, specials=body.parse_special is not False, first=True))
    return ids


class DetokenizeRoute:
    """Ids to text."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(DetokenizeFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        body, _ = await self._bodies.read(scope, receive)
        model = _model(self._service, body.model)
        if body.tokens:
            check_token(max(body.tokens), model.card.vocab_size, "tokens")
        text = decode(model.tokenizer.table, body.tokens)
        await send_json(send, DetokenizeAnswer(text, text))


class RenderRoute:
    """A chat body to the prompt that it makes."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(ChatFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        body, size = await self._bodies.read(scope, receive)
        prompt = await prompt_of(body, _model(self._service, body.model), size)
        await send_json(
            send,
            RenderAnswer(
                "".join(segment.text for segment in prompt.segments),
                prompt.ids.tolist(),
                len(prompt.ids),
                [RenderedSegment(segment.text, segment.content) for segment in prompt.segments],
                [RenderedJunction(junction.end, junction.digest.hex()) for junction in prompt.junctions],
            ),
        )
