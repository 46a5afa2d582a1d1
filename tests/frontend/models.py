"""Model folders and cards for tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from tests.fakes.scripted_core import BYTE_CARD
from wkvm_frontend.text.world import WORLD_FILE
from wkvm_proto.messages import ModelCard


def card(directory: Path | str = "", **changes: Any) -> ModelCard:
    """A card of a model in that folder."""
    return msgspec.structs.replace(BYTE_CARD, directory=str(directory), **changes)


def world_file() -> Path:
    """The vocabulary file that the package `rwkv` carries."""
    spec = find_spec("rwkv")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / WORLD_FILE


def world_folder(folder: Path) -> Path:
    """A model folder with that file."""
    folder.mkdir(exist_ok=True)
    (folder / WORLD_FILE).write_bytes(world_file().read_bytes())
    return folder


def demo_folder() -> Path:
    """The folder of the model that comes with wkvm."""
    spec = find_spec("wkvm_core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "assets" / "wkvm-demo"


def metaspace_tokenizer() -> dict[str, Any]:
    """A unigram vocabulary with byte fallback and a dummy prefix blank, whose `</s>` also sits among its pieces."""
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", -1.0], ["\u2581", -2.0], ["\u2581hello", -1.0], ["hello", -3.0]]
    pieces += [[char, -4.0] for char in "</s>abcdefghijklmnopqrstuvwxyz"[4:]]
    pieces += [[char, -5.0] for char in "</>" if char not in "abc"]
    pieces += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": "<unk>", **special},
            {"id": 1, "content": "<s>", **special},
            {"id": 2, "content": "</s>", **special},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
    }
