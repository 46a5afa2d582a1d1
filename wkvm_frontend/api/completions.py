"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.chat import OFFLOAD_BYTES, TENANT, check_prompt, max_waiting
from wkvm_frontend.api.choice import Choice, Wanted, completion_logprobs
from wkvm_frontend.api.fields import (
    GenerationFields,
    TokenId,
    check_choices,
    check_max_tokens,
    check_states,
    check_token,
    reseeded,
    sampling_of,
    stops_of,
)
from wkvm_frontend.api.form import Answered, CompletionForm
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.api.shapes import Completion, CompletionChoice
from wkvm_frontend.api.stream import EventStream
from wkvm_frontend.api.whole import WholeText, collect, state_facts, total_usage
from wkvm_frontend.failure import bad_request
from wkvm_frontend.served import ServedModel
from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import Generate
from wkvm_proto.sampling import MAX_LOGPROBS

DEFAULT_TOKENS = 16

PromptField: TypeAlias = str | list[str | TokenId | list[TokenId]]


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """Body of a completion request. `prompt`: text, token ids, or a list of either."""

    prompt: PromptField
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRoute:
    """The endpoint."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(CompletionFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError, ClientGone."""
        settings = self._service.settings
        body, size = await self._bodies.read(scope, receive)
        link = await self._service.fleet.reach(body.model, settings.core_wait_s)
        model = link.model
        assert model is not None, "a ready core has a model"
        given = listed(body.prompt)
        n = check_choices(body, model, len(given), settings.max_sequences)
        state, save_as = check_states(body, len(given) * n)
        max_tokens = check_max_tokens(body.max_tokens, model, DEFAULT_TOKENS, "max_tokens")
        logprobs = -1 if body.logprobs is None else body.logprobs
        sampling = sampling_of(body, model, max_tokens, logprobs)
        stops = stops_of(body.stop, ())
        if size > OFFLOAD_BYTES:
            prompts = await asyncio.to_thread(prompts_of, given, model, continued=bool(state))
        else:
            prompts = prompts_of(given, model, continued=bool(state))
        wanted = Wanted(
            token_ids=bool(body.return_token_ids),
            logprobs=body.logprobs is not None,
            shown_stops=frozenset(stops) if body.include_stop_str_in_output else frozenset(),
            show_stop_ids=bool(body.include_stop_str_in_output),
        )
        choices = [Choice(index, model.tokenizer, None, wanted) for index in range(len(prompts) * n)]
        template = Generate(
            request=0,
            tenant=TENANT,
            prompt=b"",
            sampling=sampling,
            n=n,
            stop_texts=stops,
            priority=body.priority or 0,
            timeout_s=settings.request_timeout_s,
            state=state,
            save_as=save_as,
            cache_salt=body.cache_salt or "",
        )
        # Without a seed of the caller's, equal prompts get different answers.
        generates = [
            msgspec.structs.replace(
                template, prompt=pack_u32(ids), sampling=sampling if body.seed not in (None, -1) else reseeded(sampling)
            )
            for ids in prompts
        ]
        answered = Answered(f"cmpl-{uuid.uuid4().hex}", int(time.time()), model.card.name)
        bound = max_waiting(settings.max_stream_bytes, answered) if body.stream else None
        generation = Generation(link, self._service.meter, bound)
        try:
            await generation.start(generates, receive, settings.accept_timeout_s)
            headers = [(b"x-wkvm-reuse", generation.reuse.encode("ascii", "replace"))]
            if body.stream:
                form = CompletionForm(answered, model.tokenizer, wanted, logprobs)
                shown = [ids.tolist() for ids in prompts] if body.return_token_ids else None
                stream = EventStream(self._service, generation, form, choices, shown, body.stream_options)
                await stream.run(scope, send, n, headers)
                return
            texts = await collect(generation, choices, n)
        finally:
            await generation.end()
        made = [
            _choice(choice, text, prompts[choice.index // n], model, wanted, top=logprobs > 0)
            for choice, text in zip(choices, texts, strict=True)
        ]
        usage = total_usage(generation, choices)
        completion = Completion(
            answered.id,
            "text_completion",
            answered.created,
            answered.model,
            made,
            usage,
            state_facts(generation, choices),
        )
        await send_json(send, completion, headers=headers)


def listed(prompt: PromptField) -> list[str | list[int]]:
    """The prompts of the field, one or several. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: the list is empty.", "prompt")
    first = type(prompt[0])
    texts_or_lists: list[str | list[int]] = []
    ids: list[int] = []
    for item in prompt:
        if type(item) is not first:
            raise bad_request(
                "prompt: a list holds texts, or token ids, or lists of token ids; not a mixture.", "prompt"
            )
        if isinstance(item, int):
            ids.append(item)
        else:
            texts_or_lists.append(item)
    return [ids] if ids else texts_or_lists


def prompts_of(given: Sequence[str | list[int]], model: ServedModel, *, continued: bool) -> list[array[int]]:
    """u32 ids of each prompt. continued: after a state, in the middle of a text. Raises ApiError 400."""
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            ids = array("I", () if continued else model.tokenizer.lead)
            ids.extend(model.tokenizer.encode(prompt, specials=True, first=not continued))
        else:
            if prompt:
                check_token(max(prompt), model.card.vocab_size, "prompt")
            ids = array("I", prompt)
        check_prompt(len(ids), model, "prompt")
        prompts.append(ids)
    return prompts


def _choice(
    choice: Choice, text: WholeText, prompt: array[int], model: ServedModel, wanted: Wanted, *, top: bool
) -> CompletionChoice:
    return CompletionChoice(
        choice.index,
        text.answer,
        completion_logprobs(model.tokenizer, choice.trace, top=top) if wanted.logprobs else None,
        choice.finish_reason or "stop",
        choice.stop_reason,
        choice.trace.ids if wanted.token_ids else None,
        prompt.tolist() if wanted.token_ids else None,
    )
