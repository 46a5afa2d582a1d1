"""Token ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a growing list of ids: never half a character, and the joined pieces are the text of all ids.

    U+FFFD stands only for bytes that no later byte can make valid, or that the end left unfinished.
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = _Utf8("replace").decode

    def feed(self, token: int) -> str:
        """The text that this id completes; may be empty."""
        return self._decode(self._table[token])

    def finish(self, tail: bytes = b"") -> str:
        """The text of `tail` and of what was still unfinished; the last call."""
        return self._decode(tail, True)
