"""Where in its line of tokens a state stands."""

from __future__ import annotations

import msgspec


class Cursor(msgspec.Struct, frozen=True):
    """Tokens that the state has consumed since the zero state, and the bytes delivered after them."""

    tokens: int = 0
    tail: bytes = b""
    """Text delivered to the reader but not consumed: the part before a text stop of the token that straddled it. It is
    read at the head of the next turn."""
