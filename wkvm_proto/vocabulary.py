"""The id -> bytes table of a tokenizer and its digest: what binds a frontend's text to a core's ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from wkvm_proto.columns import pack_u32, unpack_u32
from wkvm_proto.messages import BadFrame, Vocabulary

MAX_TOKEN_BYTES = 4096


def vocabulary_message(table: Sequence[bytes]) -> Vocabulary:
    """The message that carries `table`; ids without bytes (specials, holes) have b""."""
    return Vocabulary(ends=pack_u32(accumulate(map(len, table))), data=b"".join(table))


def vocabulary_table(message: Vocabulary) -> list[bytes]:
    """The table of a message. Raises BadFrame when the columns disagree."""
    try:
        ends = unpack_u32(message.ends)
    except ValueError:
        raise BadFrame("vocabulary: the end offsets are not a u32 column") from None
    table: list[bytes] = []
    start = 0
    for end in ends:
        if not start <= end <= min(len(message.data), start + MAX_TOKEN_BYTES):
            raise BadFrame(f"vocabulary: token {len(table)} ends at {end}, after {start} of {len(message.data)} bytes")
        table.append(message.data[start:end])
        start = end
    if start != len(message.data):
        raise BadFrame(f"vocabulary: {len(message.data) - start} bytes belong to no token")
    return table


def vocabulary_digest(message: Vocabulary) -> bytes:
    """blake2b-256 over both columns, each preceded by its length."""
    digest = hashlib.blake2b(digest_size=32)
    for column in (message.ends, message.data):
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(column)
    return digest.digest()
