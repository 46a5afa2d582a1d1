"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.choice import Choice, Wanted, chat_logprobs
from wkvm_frontend.api.fields import (
    GenerationFields,
    Positive,
    check_choices,
    check_max_tokens,
    check_states,
    sampling_of,
    stops_of,
)
from wkvm_frontend.api.form import Answered, ChatForm
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.api.shapes import AnswerMessage, ChatChoice, ChatCompletion, ChatLogprobs
from wkvm_frontend.api.stream import EventStream
from wkvm_frontend.api.whole import collect, state_facts, total_usage
from wkvm_frontend.chat.answer import Phase, phase_after
from wkvm_frontend.chat.message import BadMessage, ChatMessage, chain_digests, text_of
from wkvm_frontend.chat.template import BadTemplate, ChatOptions, Scalar, Segment, tokenise
from wkvm_frontend.failure import ApiError, bad_request
from wkvm_frontend.served import ServedModel
from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import Generate, Junction
from wkvm_proto.names import ErrorCode
from wkvm_proto.sampling import MAX_LOGPROBS

TENANT = "dev"
ALLOWED_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_MESSAGES = 16_384
OFFLOAD_BYTES = 32 * 2**10
"""Bodies above this are rendered and tokenised on a thread."""


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """Body of a chat request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation as the model reads it."""

    segments: list[Segment]
    ids: array[int]
    """u32"""
    junctions: tuple[Junction, ...]
    phase: Phase
    """How the answer begins."""


class ChatRoute:
    """The endpoint."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(ChatFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        settings = self._service.settings
        body, size = await self._bodies.read(scope, receive)
        link = await self._service.fleet.reach(body.model, settings.core_wait_s)
        model = link.model
        assert model is not None, "a ready core has a model"
        n = check_choices(body, model, 1, settings.max_sequences)
        state, save_as = check_states(body, n)
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        max_tokens = check_max_tokens(wanted_tokens, model, settings.default_chat_tokens, param)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs: needs logprobs to be true.", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        sampling = sampling_of(body, model, max_tokens, logprobs)
        own_stops = stops_of(body.stop, ())
        stops = stops_of(body.stop, () if body.ignore_eos else model.chat_stops)
        prompt = await prompt_of(body, model, size)
        check_prompt(len(prompt.ids), model, "messages")
        wanted = Wanted(
            token_ids=bool(body.return_token_ids),
            logprobs=bool(body.logprobs),
            shown_stops=frozenset(own_stops) if body.include_stop_str_in_output else frozenset(),
            show_stop_ids=bool(body.include_stop_str_in_output),
        )
        choices = [Choice(index, model.tokenizer, prompt.phase, wanted) for index in range(n)]
        generate = Generate(
            request=0,
            tenant=TENANT,
            prompt=pack_u32(prompt.ids),
            sampling=sampling,
            n=n,
            stop_texts=stops,
            priority=body.priority or 0,
            timeout_s=settings.request_timeout_s,
            junctions=prompt.junctions,
            state=state,
            save_as=save_as,
            cache_salt=body.cache_salt or "",
        )
        answered = Answered(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model.card.name)
        generation = Generation(
            link, self._service.meter, max_waiting(settings.max_stream_bytes, answered) if body.stream else None
        )
        try:
            await generation.start([generate], receive, settings.accept_timeout_s)
            headers = [(b"x-wkvm-reuse", generation.reuse.encode("ascii", "replace"))]
            if body.stream:
                form = ChatForm(answered, model.tokenizer, wanted, logprobs)
                ids = [prompt.ids.tolist()] if body.return_token_ids else None
                stream = EventStream(self._service, generation, form, choices, ids, body.stream_options)
                await stream.run(scope, send, n, headers)
                return
            texts = await collect(generation, choices, n)
        finally:
            await generation.end()
        await send_json(
            send,
            ChatCompletion(
                answered.id,
                "chat.completion",
                answered.created,
                answered.model,
                [
                    _chat_choice(choice, AnswerMessage("assistant", text.answer, text.thought), model, wanted)
                    for choice, text in zip(choices, texts, strict=True)
                ],
                total_usage(generation, choices),
                prompt.ids.tolist() if body.return_token_ids else None,
                state_facts(generation, choices),
            ),
            headers=headers,
        )


def _chat_choice(choice: Choice, message: AnswerMessage, model: ServedModel, wanted: Wanted) -> ChatChoice:
    return ChatChoice(
        choice.index,
        message,
        ChatLogprobs(chat_logprobs(model.tokenizer, choice.trace)) if wanted.logprobs else None,
        choice.finish_reason or "stop",
        choice.stop_reason,
        choice.trace.ids if wanted.token_ids else None,
    )


async def prompt_of(body: ChatFields, model: ServedModel, size: int) -> ChatPrompt:
    """The prompt of a chat body of `size` bytes. Raises ApiError naming what cannot be rendered."""
    try:
        if size > OFFLOAD_BYTES:
            return await asyncio.to_thread(_prompt, body, model)
        return _prompt(body, model)
    except BadMessage as error:
        raise bad_request(f"{error.param}: {error.message}", error.param) from None
    except BadTemplate as error:
        raise bad_request(f"messages: {error}", "messages") from None
    except RecursionError:
        raise bad_request("messages: a tool or the arguments of a call are nested too deeply.", "messages") from None


def _prompt(body: ChatFields, model: ServedModel) -> ChatPrompt:
    texts = [text_of(message, place) for place, message in enumerate(body.messages)]
    tools: list[Mapping[str, Any]] = list(body.tools or ())
    options = _options(body)
    if body.state:
        return _next_turn(body, texts, tools, options, model)
    segments = model.template.render(body.messages, texts, tools, options)
    root = model.template.digest + msgspec.json.encode(body.tools or [], order="deterministic")
    ids, junctions = tokenise(segments, model.tokenizer, chain_digests(body.messages, texts, root))
    end = "".join(segment.text for segment in segments[-2:])[-64:]
    return ChatPrompt(segments, ids, junctions, phase_after(end, continued=options.continue_final))


def _next_turn(
    body: ChatFields,
    texts: list[str],
    tools: list[Mapping[str, Any]],
    options: ChatOptions,
    model: ServedModel,
) -> ChatPrompt:
    """What a state that ends with an answer reads next: the end of that turn, then the messages."""
    turn = [ChatMessage(role="user", content="Hello."), ChatMessage(role="assistant", content="Hello.")]
    segments = model.template.render([*turn, *body.messages], ["Hello.", "Hello.", *texts], tools, options)
    answered = next((at for at, segment in enumerate(segments) if segment.content and segment.messages == 2), None)
    if answered is None:
        raise BadTemplate("this model's chat template does not tell where an answer ends")
    segments = segments[answered + 1 :]
    ids, _ = tokenise(segments, model.tokenizer, [b""] * (len(body.messages) + 3), first=False)
    end = "".join(segment.text for segment in segments[-2:])[-64:]
    return ChatPrompt(segments, ids, (), phase_after(end, continued=options.continue_final))


def _options(body: ChatFields) -> ChatOptions:
    variables: dict[str, Scalar] = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        if name not in ALLOWED_KWARGS:
            raise bad_request(
                f"chat_template_kwargs: {name[:100]!r} is not supported; allowed are {', '.join(ALLOWED_KWARGS)}.",
                "chat_template_kwargs",
                code="unsupported_parameter",
            )
        variables[name] = value
    effort = body.reasoning_effort or variables.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(f"reasoning_effort: one of {', '.join(EFFORTS)}.", "reasoning_effort")
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    open_end = body.messages[-1].role == "assistant"
    if body.continue_final_message and not open_end:
        raise bad_request("continue_final_message: the last message is not the assistant's.", "continue_final_message")
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("continue_final_message: not together with add_generation_prompt.", "continue_final_message")
    # Chat front ends continue an answer by sending it last, without any flag.
    continues = open_end and body.continue_final_message is not False and not body.add_generation_prompt
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=continues and bool(body.messages[-1].content),
        variables=variables,
    )


def check_prompt(tokens: int, model: ServedModel, param: str) -> None:
    """Raises ApiError 400 for an empty prompt and for one above the model's bound."""
    if tokens == 0:
        raise bad_request(f"{param}: the prompt is empty.", param)
    bound = model.card.max_prompt_tokens
    if tokens > bound:
        raise ApiError(
            400,
            f"{param}: {tokens} tokens are more than the {bound} that this server reads.",
            code=ErrorCode.PROMPT_TOO_LONG,
            param=param,
        )


def max_waiting(max_bytes: int, answered: Answered) -> int:
    """How many tokens make so many bytes of events."""
    event_bytes = 160 + len(answered.id) + len(answered.model)
    return max(max_bytes // event_bytes, 16)
