"""Answers of the generation routes, in OpenAI's shapes."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: prompt tokens that a kept state made unnecessary to read."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; `completion_tokens` counts a token that stopped the answer too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate token; `bytes` null for a control token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token with the best candidates at its place, of the raw distribution."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of an answer's tokens, thoughts included."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion's tokens; offsets count characters of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AnswerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the model said; thoughts apart."""

    role: str
    content: str | None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class StateFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request with `state` or `save_as` began from and left behind."""

    reuse: str
    """`state`, or `cold`."""
    reused_tokens: int
    """That the state had read before."""
    grade: str
    """`invariant`: another cut of the same tokens gives the same answer; `bounded`: up to rounding."""
    state: str = ""
    """`name@version` of the state at the end."""


class ChatCompletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a chat request that does not stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    wkvm: StateFacts | None = None


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a completion request that does not stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    wkvm: StateFacts | None = None


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The usage with its total."""
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
