"""The chat template of a model folder, and what its generation_config.json says of stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from wkvm_frontend.chat.jinja_template import MAX_TEMPLATE_BYTES, JinjaTemplate
from wkvm_frontend.chat.template import BadTemplate, Template
from wkvm_frontend.chat.world_template import SqueezedTemplate, WorldTemplate
from wkvm_frontend.text.tokenizer import Tokenizer
from wkvm_proto.messages import ModelCard

TEMPLATE_FILE = "chat_template.jinja"
MAX_JSON_BYTES = 16 * 2**20
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class StopDefaults(msgspec.Struct, frozen=True):
    """What ends an answer of this model besides its own end-of-text ids."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


def open_template(card: ModelCard, tokenizer: Tokenizer) -> Template:
    """chat_template.jinja, else the template in tokenizer_config.json, else the built-in World format. Raises
    BadTemplate."""
    own = _own_template(Path(card.directory), tokenizer) if card.directory else None
    if own is None:
        return WorldTemplate()
    return SqueezedTemplate(own) if card.family.startswith("rwkv") else own


def _own_template(folder: Path, tokenizer: Tokenizer) -> Template | None:
    config = _json(folder / "tokenizer_config.json")
    variables = {name: _token_text(config.get(name)) for name in _TOKEN_VARIABLES if config.get(name) is not None}
    spellings = list(tokenizer.specials.values())
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return JinjaTemplate(_text(file, MAX_TEMPLATE_BYTES), TEMPLATE_FILE, variables, spellings)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if isinstance(source, str):
        return JinjaTemplate(source, "tokenizer_config.json", variables, spellings)
    return None


def open_stop_defaults(directory: str) -> StopDefaults:
    """`eos_token_id` and `stop_strings` of generation_config.json. Raises BadTemplate when they have wrong types."""
    config = _json(Path(directory) / "generation_config.json") if directory else {}
    try:
        ids = msgspec.convert(config.get("eos_token_id"), int | list[int] | None)
        texts = msgspec.convert(config.get("stop_strings"), str | list[str] | None)
    except msgspec.ValidationError as error:
        raise BadTemplate(f"generation_config.json: {error}") from None
    return StopDefaults(
        ids=tuple([ids] if isinstance(ids, int) else ids or ()),
        texts=tuple([texts] if isinstance(texts, str) else texts or ()),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_text(path, MAX_JSON_BYTES), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise BadTemplate(f"{path.name} is not a JSON object") from None


def _text(path: Path, limit: int) -> str:
    try:
        if path.stat().st_size > limit:
            raise BadTemplate(f"{path.name} is larger than {limit} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTemplate(f"{path.name} cannot be read: {type(error).__name__}") from None


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)
