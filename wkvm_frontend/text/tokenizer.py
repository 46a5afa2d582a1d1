"""What the frontend needs of a tokenizer, whatever its file format."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class BadTokenizer(Exception):
    """A model folder whose tokenizer cannot be used; the message says what is missing or wrong, for its operator."""


class Tokenizer(Protocol):
    """Text of one model to its ids and back.

    `decode(encode(text, specials=False))` is `text` for every text that the vocabulary can spell.
    """

    @property
    def table(self) -> Sequence[bytes]:
        """Bytes of every id of the model; b"" for special tokens and holes. As long as the model's vocabulary."""

    @property
    def specials(self) -> Mapping[int, str]:
        """Spelling of the control tokens by id."""

    @property
    def lead(self) -> tuple[int, ...]:
        """Ids that the tokenizer itself puts before a raw prompt; usually none."""

    def encode(self, text: str, *, specials: bool, first: bool = False) -> array[int]:
        """u32 ids. `specials`: whether the spelling of a control token becomes that token; when refused, no control
        id comes out, whatever the text holds. `first`: the text opens the prompt."""


def decode(table: Sequence[bytes], ids: Iterable[int]) -> str:
    """The text of ids; bytes that are not UTF-8 become U+FFFD. Raises IndexError for an id outside the table."""
    return b"".join([table[token] for token in ids]).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """How one token is shown: its text, a control token's spelling, or `bytes:\\x..` for a part of a character."""
    if token in tokenizer.specials:
        return tokenizer.specials[token]
    piece = tokenizer.table[token] if token < len(tokenizer.table) else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
