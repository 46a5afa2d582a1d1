"""Generation fields of chat and completions, and what they mean to the core."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from wkvm_frontend.failure import ApiError, bad_request
from wkvm_frontend.served import ServedModel
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.messages import MAX_SAMPLES, MAX_STOP_TEXT_BYTES, MAX_STOP_TEXTS
from wkvm_proto.names import BadHandle, ErrorCode, check_name, parse_handle
from wkvm_proto.sampling import (
    MAX_OUTPUT_TOKENS,
    AdditivePenalty,
    RepetitionPenalty,
    Sampling,
    Share,
    Temperature,
)

MAX_BIAS = 100.0
MAX_BIAS_IDS = 2**18
MAX_STOP_IDS = 4096

Positive = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: one more chunk with the usage, before the end; `continuous_usage_stats`: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and completions share. null is the same as absent; unknown fields are ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    max_tokens: Positive | None = None
    min_tokens: NotNegative | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_OUTPUT_TOKENS)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, float | None] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, Meta(max_length=160)] | None = None
    user: str | None = None
    state: str | None = None
    """Handle of a state to start from: the prompt is what it reads next."""
    save_as: str | None = None
    """Name to keep the state at the end under."""


def check_choices(fields: GenerationFields, model: ServedModel, prompts: int, max_sequences: int) -> int:
    """n. Raises ApiError when n, best_of or the number of sequences is out of bounds."""
    n = fields.n or 1
    if fields.best_of is not None and fields.best_of != n:
        raise bad_request("best_of: only the value of n is supported.", "best_of", code="unsupported_parameter")
    if n > model.card.num_slots:
        raise ApiError(
            400,
            f"n: {n} samples; this server runs at most {model.card.num_slots} at once.",
            code=ErrorCode.TOO_MANY_SAMPLES,
            param="n",
        )
    if n * prompts > max_sequences:
        raise bad_request(
            f"prompt: {prompts} prompts times n = {n} is more than {max_sequences} sequences.",
            "prompt",
            code=ErrorCode.TOO_MANY_SAMPLES,
        )
    return n


def check_states(fields: GenerationFields, sequences: int) -> tuple[str, str]:
    """`state` and `save_as`, empty where they are absent. Raises ApiError naming the field that is wrong."""
    state, save_as = fields.state or "", fields.save_as or ""
    try:
        if state:
            parse_handle(state)
    except BadHandle as error:
        raise bad_request(f"state: {error}.", "state") from None
    try:
        if save_as:
            check_name(save_as)
    except BadHandle as error:
        raise bad_request(f"save_as: {error}.", "save_as") from None
    if save_as and sequences != 1:
        raise bad_request(f"save_as: one state cannot be kept of {sequences} sequences.", "save_as")
    return state, save_as


def check_max_tokens(wanted: int | None, model: ServedModel, default: int, param: str) -> int:
    """The most tokens to generate. Raises ApiError when that is more than the model's bound."""
    bound = model.card.max_output_tokens
    if wanted is None:
        return min(default, bound)
    if wanted > bound:
        raise bad_request(
            f"{param}: {wanted} is more than the {bound} tokens that this server generates at most.", param
        )
    return wanted


def sampling_of(fields: GenerationFields, model: ServedModel, max_tokens: int, logprobs: int) -> Sampling:
    """The core's form of the fields. Raises ApiError naming the field or id that is wrong."""
    bias = _bias(fields.logit_bias, model.card.vocab_size)
    stop_ids = set() if fields.ignore_eos else set(model.eos_ids)
    for token in fields.stop_token_ids or ():
        check_token(token, model.card.vocab_size, "stop_token_ids")
        stop_ids.add(token)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}.", "min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed in (None, -1) else fields.seed or 0,
        temperature=_or(fields.temperature, 1.0),
        top_k=max(fields.top_k or 0, 0),
        top_p=_or(fields.top_p, 1.0),
        min_p=_or(fields.min_p, 0.0),
        typical_p=_or(fields.typical_p, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        bias_ids=pack_u32(bias),
        bias_values=pack_f32(bias.values()),
        stop_ids=pack_u32(sorted(stop_ids)),
        min_tokens=min_tokens,
        logprobs=logprobs,
    )


def reseeded(sampling: Sampling) -> Sampling:
    """The same with a seed of its own."""
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))


def stops_of(given: str | list[str] | None, defaults: Sequence[str]) -> tuple[bytes, ...]:
    """Stop strings as bytes, the caller's first; an empty string is refused. Raises ApiError."""
    own = [given] if isinstance(given, str) else given or []
    if len(own) > MAX_STOP_TEXTS:
        raise bad_request(f"stop: {len(own)} strings; at most {MAX_STOP_TEXTS} are allowed.", "stop")
    for text in own:
        size = len(text.encode())
        if size == 0:
            raise bad_request("stop: a stop string cannot be empty.", "stop")
        if size > MAX_STOP_TEXT_BYTES:
            raise bad_request(f"stop: a string of {size} bytes; at most {MAX_STOP_TEXT_BYTES} are allowed.", "stop")
    every = tuple(dict.fromkeys(text.encode() for text in (*own, *defaults)))
    if len(every) > MAX_STOP_TEXTS:
        raise bad_request(
            f"stop: at most {MAX_STOP_TEXTS} strings, and {len(every) - len(set(own))} of them are this model's own.",
            "stop",
        )
    return every


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Raises ApiError 400 naming the id when the vocabulary does not have it."""
    if not 0 <= token < vocab_size:
        message = f"{param}: token id {token} is outside the vocabulary of {vocab_size} ids."
        raise bad_request(message, param, code=ErrorCode.TOKEN_OUT_OF_RANGE)


def _bias(given: dict[str, float | None] | None, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    if given and len(given) > MAX_BIAS_IDS:
        raise bad_request(f"logit_bias: more than {MAX_BIAS_IDS} ids.", "logit_bias")
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias: {key[:40]!r} is not a token id.", "logit_bias")
        token = int(key)
        check_token(token, vocab_size, "logit_bias")
        if value is None or not -MAX_BIAS <= value <= MAX_BIAS:
            raise bad_request(f"logit_bias: the bias of id {token} is not a number from -100 to 100.", "logit_bias")
        bias[token] = value
    return bias


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
