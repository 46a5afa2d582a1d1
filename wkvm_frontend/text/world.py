"""The RWKV World vocabulary: 65,529 byte strings, matched greedily, the longest first."""

from __future__ import annotations

import ast
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from wkvm_frontend.text.tokenizer import BadTokenizer

WORLD_FILE = "rwkv_vocab_v20230424.txt"
MAX_WORLD_FILE_BYTES = 8 * 2**20
END_OF_TEXT = 0


class WorldTokenizer:
    """Greedy longest match over the bytes of the text. Id 0 ends a text and has no bytes; nothing spells it."""

    lead: tuple[int, ...] = ()

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Reads the vocabulary file. Raises BadTokenizer naming the line that is wrong."""
        self.table: Sequence[bytes] = _read(path, vocab_size)
        self.specials: Mapping[int, str] = {END_OF_TEXT: "<|endoftext|>"}
        # The trie as one dict: (node * 256 + byte) -> node; node 0 is the root. `_token[node]` is its id or -1.
        self._edges: dict[int, int] = {}
        self._token: array[int] = array("i", [-1])
        for token, piece in enumerate(self.table):
            if piece:
                self._add(piece, token)
        missing = [
            value for value in range(256) if self._edges.get(value) is None or self._token[self._edges[value]] < 0
        ]
        if missing:
            raise BadTokenizer(f"{path.name}: no token for byte {missing[0]}")

    def _add(self, piece: bytes, token: int) -> None:
        node = 0
        for byte in piece:
            key = node << 8 | byte
            after = self._edges.get(key)
            if after is None:
                after = len(self._token)
                self._edges[key] = after
                self._token.append(-1)
            node = after
        self._token[node] = token

    def encode(self, text: str, *, specials: bool, first: bool = False) -> array[int]:
        """Ids of the text; the same for every `specials`, as no text spells id 0."""
        data = text.encode()
        follow, token_of = self._edges.get, self._token
        ids = array("I")
        start, size = 0, len(data)
        while start < size:
            node, place = 0, start
            token, end = -1, start
            while place < size:
                after = follow(node << 8 | data[place])
                if after is None:
                    break
                node = after
                place += 1
                if token_of[node] >= 0:
                    token, end = token_of[node], place
            ids.append(token)  # never -1: every byte is a token
            start = end
        return ids


def _read(path: Path, vocab_size: int) -> list[bytes]:
    """Lines are `id literal length`; the literal is a Python str or bytes literal, read without evaluating code."""
    try:
        if path.stat().st_size > MAX_WORLD_FILE_BYTES:
            raise BadTokenizer(f"{path.name} is larger than {MAX_WORLD_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTokenizer(f"{path.name} cannot be read: {type(error).__name__}") from None
    table = [b""] * vocab_size
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            head, _, rest = line.partition(" ")
            literal, _, length = rest.rpartition(" ")
            token, value = int(head), ast.literal_eval(literal)
            piece = value.encode() if isinstance(value, str) else bytes(value)
            fits = len(piece) == int(length) and len(piece) > 0
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise BadTokenizer(f"{path.name} line {number}: not `id literal length`") from None
        if not fits:
            raise BadTokenizer(f"{path.name} line {number}: {len(piece)} bytes, not as the line says")
        if not 0 <= token < vocab_size:
            raise BadTokenizer(f"{path.name} line {number}: id {token}; the model has {vocab_size}")
        table[token] = piece
    return table
