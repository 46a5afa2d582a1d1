"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from wkvm_frontend.text.byte_tokenizer import ByteTokenizer
from wkvm_frontend.text.huggingface import TOKENIZER_FILE, HfTokenizer
from wkvm_frontend.text.tokenizer import BadTokenizer, Tokenizer
from wkvm_frontend.text.world import WORLD_FILE, WorldTokenizer
from wkvm_proto.messages import ModelCard

WORLD_IDS = 65_530


def open_tokenizer(card: ModelCard) -> Tokenizer:
    """The tokenizer of the card's folder, or one id a byte for a model without a folder. Raises BadTokenizer, which
    says what file to put where."""
    if not card.directory:
        return ByteTokenizer(card.vocab_size)
    folder = Path(card.directory)
    world = folder / WORLD_FILE
    if world.is_file() and card.vocab_size >= WORLD_IDS:
        return WorldTokenizer(world, card.vocab_size)
    if (folder / TOKENIZER_FILE).is_file():
        return HfTokenizer(folder / TOKENIZER_FILE, card.vocab_size)
    if card.family.startswith("rwkv") and card.vocab_size >= WORLD_IDS - 1:
        raise BadTokenizer(
            f"the model {card.name!r} uses the RWKV World vocabulary: put the file {WORLD_FILE} (it is part of the "
            f"PyPI package `rwkv`) beside its weights, into {folder}"
        )
    raise BadTokenizer(f"the model {card.name!r} has no {TOKENIZER_FILE} in {folder}: put its tokenizer there")
