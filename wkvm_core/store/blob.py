"""The bytes of a state in a file: safetensors, with a header that its content determines. docs/state-format.md."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from blake3 import blake3

from wkvm_core.errors import Refused
from wkvm_core.state.cursor import Cursor
from wkvm_core.state.layout import Fingerprint, StateFamily, StateLayout
from wkvm_core.store.files import Data
from wkvm_proto.names import ErrorCode

FORMAT = "wkvm.state.1"
HEADER_LIMIT = 1 << 20
"""Bytes of JSON at the head of a file, its padding included."""
PAYLOAD_ALIGNMENT = 4096
TAIL_LIMIT = 4096
"""Bytes of a cursor's tail: less than one token's text."""
IDS_TENSOR = "wkvm.ids"
"""The tensor of token ids that only a flattened file has, after the families."""
DTYPES = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint8": "U8",
}
_LENGTH_BYTES = 8
_KEYS = {
    "format",
    "fingerprint.model",
    "fingerprint.layout",
    "fingerprint.numerics",
    "layout",
    "cursor.tokens",
    "cursor.tail",
    "ids",
}
_TOKENS = re.compile(r"0|[1-9][0-9]{0,17}")
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")
_MAX_RANK = 16
_MAX_MEMBERS = 4096
"""Objects' members in a header, more than any model has by far: what reading one may cost."""


class BlobHeader(msgspec.Struct, frozen=True):
    """All that a state's file says beside the values of its families."""

    layout: StateLayout
    fingerprint: Fingerprint
    cursor: Cursor
    ids: str = ""
    """`ids_digest` of all ids, however they are cut into segments; empty when they were left out."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A line of the tensor table."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class RawHeader(msgspec.Struct, frozen=True):
    """A header as it was read: well formed, but not yet compared with anything."""

    meta: dict[str, str]
    tensors: dict[str, TensorEntry]


def ids_digest(ids: Data) -> str:
    """Hex blake3 of a u32 column."""
    return blake3(ids).hexdigest()


def packed_bytes(layout: StateLayout) -> int:
    """Bytes of all families one after the other, without the slot's gaps."""
    return sum(family.nbytes for family in layout.families)


def spans(layout: StateLayout) -> list[tuple[int, int]]:
    """Begin and end of each family in a slot; in a file they follow each other without gaps."""
    return [(offset, offset + family.nbytes) for family, offset in zip(layout.families, layout.offsets, strict=True)]


def table(layout: StateLayout, num_ids: int | None = None) -> dict[str, TensorEntry]:
    """The tensors of a file in their order; the ids' tensor is in it when `num_ids` says how many there are."""
    tensors, end = {}, 0
    for family in layout.families:
        begin, end = end, end + family.nbytes
        tensors[family.name] = TensorEntry(DTYPES[family.dtype], (family.layers, *family.shape), begin, end)
    if num_ids is not None:
        tensors[IDS_TENSOR] = TensorEntry("U32", (num_ids,), end, end + 4 * num_ids)
    return tensors


def encode_header(header: BlobHeader, num_ids: int | None = None) -> bytes:
    """Everything before the payload: length, JSON, and spaces up to a multiple of 4 KiB. Equal for equal headers."""
    assert len(header.cursor.tail) <= TAIL_LIMIT, f"a tail of {len(header.cursor.tail)} bytes"
    document: dict[str, Any] = {"__metadata__": _meta(header)}
    for name, entry in table(header.layout, num_ids).items():
        document[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    text = msgspec.json.encode(document)
    total = -(-(_LENGTH_BYTES + len(text)) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    assert total - _LENGTH_BYTES <= HEADER_LIMIT, f"a header of {len(text)} bytes"
    return (total - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(total - _LENGTH_BYTES)


def encode_parts(header: BlobHeader, block: memoryview, ids: Data | None = None) -> list[Data]:
    """A whole file, in parts to be written one after the other; the families are views of `block`, the `slot_bytes` of
    a slot. With `ids`, a u32 column, it is the flattened file that callers get and give."""
    assert len(block) == header.layout.slot_bytes, f"{len(block)} bytes for a slot of {header.layout.slot_bytes}"
    assert ids is None or header.ids == ids_digest(ids), "the ids are not those of the header"
    families = [block[begin:end] for begin, end in spans(header.layout)]
    head = encode_header(header, None if ids is None else len(ids) // 4)
    return [head, *families] if ids is None else [head, *families, ids]


def header_size(first: bytes | memoryview, file_size: int) -> int:
    """Bytes before the payload, from the first 8 of a file. Refuses a header over 1 MiB or over the file's end."""
    if file_size < _LENGTH_BYTES or len(first) < _LENGTH_BYTES:
        raise bad_state("header", f"a file of {file_size} bytes holds no header")
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT:
        raise bad_state("header", f"a header of {length} bytes; at most {HEADER_LIMIT}")
    if _LENGTH_BYTES + length > file_size:
        raise bad_state("header", f"a header of {length} bytes in a file of {file_size}")
    return _LENGTH_BYTES + length


def parse_header(raw: bytes | memoryview) -> RawHeader:
    """The JSON of a header, at most 1 MiB of it. Refuses with `bad_state` what is not JSON of the shape of a state's
    header, a name that occurs twice, and a format that is not known."""
    assert len(raw) <= HEADER_LIMIT, len(raw)
    document = _parse_json(bytes(raw))
    meta = document.pop("__metadata__", None)
    if type(meta) is not dict or not all(type(value) is str for value in meta.values()):
        raise bad_state("__metadata__", "it is missing, or not an object of strings")
    if meta.get("format") != FORMAT:
        raise bad_state("format", f"{clip(meta.get('format', ''))} is not {FORMAT}")
    if meta.keys() != _KEYS:
        odd = min(meta.keys() ^ _KEYS)
        raise bad_state("__metadata__", f"{clip(odd)} is {'missing' if odd in _KEYS else 'not known'}")
    return RawHeader(meta, {name: _entry(name, value) for name, value in document.items()})


def decode_header(raw: RawHeader) -> BlobHeader:
    """What a header says, in types. Refuses with `bad_state` values that no state has."""
    meta = raw.meta
    try:
        families = msgspec.json.decode(meta["layout"], type=tuple[StateFamily, ...])
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: half a character
        raise bad_state("layout", "it is not a list of families") from None
    if _TOKENS.fullmatch(meta["cursor.tokens"]) is None:
        raise bad_state("cursor.tokens", f"{clip(meta['cursor.tokens'])} is not a count")
    if _DIGEST.fullmatch(meta["ids"]) is None:
        raise bad_state("ids", f"{clip(meta['ids'])} is not a digest")
    return BlobHeader(
        layout=StateLayout(families),
        fingerprint=Fingerprint(
            model=meta["fingerprint.model"],
            layout=meta["fingerprint.layout"],
            numerics=meta["fingerprint.numerics"],
        ),
        cursor=Cursor(tokens=int(meta["cursor.tokens"]), tail=_tail(meta["cursor.tail"])),
        ids=meta["ids"],
    )


def bad_state(part: str, message: str) -> Refused:
    """The refusal of a file that is no state; `part` is what is wrong with it."""
    return Refused(ErrorCode.BAD_STATE, f"{part}: {message}", param=part)


def clip(text: str) -> str:
    """Foreign text in a message: ASCII, quoted, at most 64 characters of it."""
    return ascii(text if len(text) <= 64 else text[:61] + "...")


def _meta(header: BlobHeader) -> dict[str, str]:
    return {
        "format": FORMAT,
        "fingerprint.model": header.fingerprint.model,
        "fingerprint.layout": header.fingerprint.layout,
        "fingerprint.numerics": header.fingerprint.numerics,
        "layout": msgspec.json.encode(header.layout.families).decode(),
        "cursor.tokens": str(header.cursor.tokens),
        "cursor.tail": header.cursor.tail.hex(),
        "ids": header.ids,
    }


def _parse_json(raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise bad_state("header", "it is not a JSON object")
    left = _MAX_MEMBERS

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal left
        left -= len(pairs) + 1
        if left < 0:
            raise bad_state("header", f"more than {_MAX_MEMBERS} members")
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise bad_state("header", f"the name {clip(twice)} occurs twice")
        return found

    def constant(text: str) -> None:
        raise bad_state("header", f"{text} is not JSON")

    try:
        document = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise bad_state("header", "it is nested too deep") from None
    except ValueError:  # no UTF-8, no JSON, or a number of thousands of digits
        raise bad_state("header", "it is not JSON") from None
    assert isinstance(document, dict), type(document)
    return document


def _entry(name: str, value: object) -> TensorEntry:
    where = f"tensor {clip(name)}"
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad_state(where, "it has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str:
        raise bad_state(where, "its dtype is not a string")
    if not _are_counts(shape) or len(shape) > _MAX_RANK:
        raise bad_state(where, f"its shape is not a list of at most {_MAX_RANK} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise bad_state(where, "its data_offsets are not two counts")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _tail(text: str) -> bytes:
    if len(text) > 2 * TAIL_LIMIT or re.fullmatch(r"(?:[0-9a-f]{2})*", text) is None:
        raise bad_state("cursor.tail", f"it is not hex of at most {TAIL_LIMIT} bytes")
    return bytes.fromhex(text)
