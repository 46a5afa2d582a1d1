"""States for the tests of the store: a layout with gaps and every kind of value, and files made of it."""

from __future__ import annotations

import json
from array import array
from random import Random
from typing import Any

import numpy as np

from wkvm_core.state.cursor import Cursor
from wkvm_core.state.layout import Fingerprint, StateFamily, StateLayout
from wkvm_core.store.blob import BlobHeader, encode_parts, ids_digest, spans

LAYOUT = StateLayout(
    (
        StateFamily(name="matrix", shape=(2, 4, 4), dtype="float32", layers=3, sharded_axis=0),
        StateFamily(name="shift", shape=(9,), dtype="bfloat16", layers=3),
        StateFamily(name="half", shape=(5,), dtype="float16", layers=1),
        StateFamily(name="wide", shape=(1,), dtype="float64", layers=2),
        StateFamily(name="count", shape=(2,), dtype="int64", layers=1),
    )
)
FINGERPRINT = Fingerprint(model="m" * 64, layout=LAYOUT.fingerprint, numerics="float32")
IDS = array("I", range(41)).tobytes()
VOCAB_SIZE = 100


def header(tokens: int = 41, tail: bytes = b"\xff<", ids: bytes | None = IDS) -> BlobHeader:
    """What goes with a block of `block`."""
    digest = "" if ids is None else ids_digest(ids)
    return BlobHeader(LAYOUT, FINGERPRINT, Cursor(tokens=tokens, tail=tail), digest)


def block(seed: int = 0, layout: StateLayout = LAYOUT, gap: int = 0) -> memoryview:
    """A slot with finite values of every bit pattern; gaps hold the byte `gap`."""
    random = Random(seed)
    data = bytearray([gap]) * layout.slot_bytes
    for (start, stop), family in zip(spans(layout), layout.families, strict=True):
        if family.dtype == "int64":
            data[start:stop] = random.randbytes(stop - start)
        else:
            word = {"float64": "<u8", "float32": "<u4"}.get(family.dtype, "<u2")
            words = np.frombuffer(random.randbytes(stop - start), word)
            bits = {"float64": 62, "float32": 30}.get(family.dtype, 14)  # the exponent's first bit clear: finite
            data[start:stop] = (words & ~np.array(1 << bits, word)).astype(word).tobytes()
    return memoryview(data)


def flat_file(ids: bytes | None = IDS, tail: bytes = b"\xff<", seed: int = 0) -> bytes:
    """A whole file, as a caller uploads it."""
    tokens = 41 if ids is None else len(ids) // 4
    return b"".join(encode_parts(header(tokens, tail, ids), block(seed), ids))


def split(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Header as a dict, payload."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def join(document: object, payload: bytes) -> bytes:
    """A file of a header, as text or as what is encoded, and a payload."""
    text = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + payload
