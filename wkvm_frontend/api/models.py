"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import ApiError
from wkvm_frontend.served import ServedModel


class ModelFacts(msgspec.Struct, frozen=True):
    """What is known of a model beyond OpenAI's fields."""

    family: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_prompt_tokens: int
    max_output_tokens: int
    num_slots: int
    slot_bytes: int
    num_parameters: int
    compute_dtype: str
    state_dtype: str
    deterministic: bool
    fingerprint: str
    chat_template: str
    prefix_stable: bool
    """Whether a longer conversation begins with the tokens of the shorter one, so that kept states serve the next
    turn."""
    stop_strings: tuple[str, ...]


class ModelEntry(msgspec.Struct, frozen=True):
    """One served model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    wkvm: ModelFacts


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    object: str
    data: list[ModelEntry]


class ModelsRoute:
    """The list. 503 while no engine is ready."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError."""
        models = self._service.fleet.models()
        await send_json(send, ModelList("list", [_entry(models[name]) for name in sorted(models)]))


class ModelRoute:
    """One model. 404 for a name that no engine serves."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError."""
        model = self._service.fleet.pick(scope["path_params"]["name"]).model
        if model is None:
            raise ApiError(404, "The model does not exist.", code="model_not_found")
        await send_json(send, _entry(model))


def _entry(model: ServedModel) -> ModelEntry:
    card = model.card
    facts = ModelFacts(
        family=card.family,
        vocab_size=card.vocab_size,
        eos_ids=model.eos_ids,
        max_prompt_tokens=card.max_prompt_tokens,
        max_output_tokens=card.max_output_tokens,
        num_slots=card.num_slots,
        slot_bytes=card.slot_bytes,
        num_parameters=card.num_parameters,
        compute_dtype=card.compute_dtype,
        state_dtype=card.state_dtype,
        deterministic=card.deterministic,
        fingerprint=card.fingerprint,
        chat_template=model.template.name,
        prefix_stable=model.prefix_stable,
        stop_strings=model.chat_stops,
    )
    return ModelEntry(card.name, "model", card.created, "wkvm", card.max_prompt_tokens, facts)
