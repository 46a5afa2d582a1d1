"""One id a byte: the tokenizer of models that carry none."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from wkvm_frontend.text.tokenizer import BadTokenizer


class ByteTokenizer:
    """Id = byte value. Ids above 255 are spelled as a space and their number in hexadecimal, about as long as a word's
    token; text never becomes one of them."""

    lead: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 256:
            raise BadTokenizer(f"a byte-level vocabulary has at least 256 ids, this one {vocab_size}")
        self.table: Sequence[bytes] = [bytes([token]) if token < 256 else b" %x" % token for token in range(vocab_size)]
        self.specials: Mapping[int, str] = {}

    def encode(self, text: str, *, specials: bool, first: bool = False) -> array[int]:
        """The UTF-8 bytes of the text; there are no control tokens to allow or refuse."""
        return array("I", list(text.encode()))
