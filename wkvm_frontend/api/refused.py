"""Fields that would change the output and are not supported: refused by name, unless they ask for nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from wkvm_frontend.failure import bad_request

# field -> values that ask for nothing, besides null
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "json_schema": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "session": (),
    "return_state": (False,),
    "state_data": (),
    "cache": (True,),
}


def _refusable() -> msgspec.json.Decoder[Any]:
    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in REFUSED_FIELDS]
    return msgspec.json.Decoder(msgspec.defstruct("Refusable", fields))


_decoder = _refusable()


def check_refused(data: bytes) -> None:
    """Raises ApiError 400 naming the first field of the JSON body that is not supported."""
    body = _decoder.decode(data)
    for name, neutral in REFUSED_FIELDS.items():
        raw = bytes(getattr(body, name))
        if raw in (b"", b"null"):
            continue
        value = msgspec.json.decode(raw)
        if not any(type(value) is type(item) and value == item for item in neutral):
            raise bad_request(f"{name}: not supported by this server.", name, code="unsupported_parameter")
