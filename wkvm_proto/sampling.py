"""How a request is sampled: one value, the same on the wire, in the scheduler and in the sampler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20
MAX_OUTPUT_TOKENS = 2**31 - 1

U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
# Both bounds on every float: a lone lower bound lets +inf through, none lets NaN through.
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
AdditivePenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
IdColumn = Annotated[bytes, Meta(max_length=4 * 2**18)]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Order of application to the raw logits: repetition, presence and frequency penalties; logit bias; ban of
    stop ids before `min_tokens`; temperature; top-k; top-p; typical-p; min-p; draw.

    Greedy when `temperature` is 0 (ties go to the lowest id); log-probabilities are always of the raw distribution.
    """

    max_tokens: Count
    seed: U63 = 0
    temperature: Temperature = 1.0
    top_k: Count = 0
    """0 = off."""
    top_p: Share = 1.0
    min_p: Share = 0.0
    typical_p: Share = 1.0
    presence_penalty: AdditivePenalty = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    bias_ids: IdColumn = b""
    """u32 column of distinct ids, as long as `bias_values`."""
    bias_values: IdColumn = b""
    """f32 column, each -100..100; -100 or less bans the id."""
    stop_ids: IdColumn = b""
    """u32 column; the model's end-of-text ids are in it unless the caller ignores them."""
    min_tokens: Count = 0
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """-1 = none; k = the chosen token's and the k best."""
