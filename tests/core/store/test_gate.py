from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.store.states import FINGERPRINT, IDS, LAYOUT, VOCAB_SIZE, block, flat_file, header, join, split
from wkvm_core.errors import Refused
from wkvm_core.state.cursor import Cursor
from wkvm_core.store.blob import HEADER_LIMIT, IDS_TENSOR, BlobHeader, encode_header, packed_bytes
from wkvm_core.store.gate import Gate, Imported
from wkvm_core.store.objects import digest_of, tenant_key
from wkvm_proto.names import ErrorCode

GATE = Gate(LAYOUT, FINGERPRINT, VOCAB_SIZE)
PACKED = packed_bytes(LAYOUT)


def check(file: bytes, digest: str = "") -> Imported:
    return GATE.check(memoryview(file), tenant="a", digest=digest)


def refusal(file: bytes) -> Refused:
    """The refusal of a file, which takes little memory whatever the file says of itself."""
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as raised:
            check(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20, f"{peak} bytes"
    return raised.value


def changed(change: Callable[[dict[str, Any]], object], payload: Callable[[bytes], bytes] = bytes) -> bytes:
    """A good file with its header and payload changed."""
    document, values = split(flat_file())
    change(document)
    return join(document, payload(values))


def test_a_good_file_passes_and_unpacks_to_the_slot_it_came_from() -> None:
    file = flat_file()
    imported = check(file, digest_of(tenant_key("a"), (file,)))
    assert imported.header == header()
    assert imported.ids == IDS
    into = memoryview(bytearray(b"\xaa" * LAYOUT.slot_bytes))
    imported.unpack(into)
    assert into == block()


def test_a_file_without_ids_passes_and_has_none() -> None:
    imported = check(flat_file(ids=None))
    assert imported.ids is None
    assert imported.header.ids == ""
    document, values = split(flat_file())
    del document[IDS_TENSOR]
    assert check(join(document, values[:PACKED])).header.ids == "", "a digest of ids that are not there says nothing"


def test_tensors_may_follow_each_other_in_any_order_and_the_header_in_any_layout() -> None:
    document, values = split(flat_file())
    end = len(values)
    matrix = document["matrix"]["data_offsets"][1]
    for name, entry in document.items():
        if name not in ("__metadata__", "matrix"):
            entry["data_offsets"] = [offset - matrix for offset in entry["data_offsets"]]
    document["matrix"]["data_offsets"] = [end - matrix, end]
    text = json.dumps(dict(reversed(document.items())), indent=1).encode() + b"   "
    into = memoryview(bytearray(LAYOUT.slot_bytes))
    check(join(text, values[matrix:] + values[:matrix])).unpack(into)
    assert into == block()


def entry(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Changes fields of the first tensor."""
    return lambda document: document["matrix"].update(fields)


def meta(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Changes fields of the metadata; `_` stands for a dot."""
    return lambda document: document["__metadata__"].update({k.replace("_", "."): v for k, v in fields.items()})


def doubled(once: bytes, twice: bytes) -> bytes:
    """A good file in whose header a name occurs twice, the second time as it was: last wins would accept it."""
    document, values = split(flat_file())
    text = json.dumps(document, separators=(",", ":")).encode()
    assert once in text
    return join(text.replace(once, twice, 1), values)


def nothing(document: dict[str, Any]) -> None:
    pass


SIZE = 3 * 2 * 4 * 4 * 4
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "header"),
    "seven bytes": (b"1234567", "header"),
    "header of 2^63": ((1 << 63).to_bytes(8, "little") + b"{}", "header"),
    "header of 99 MB in a short file": ((99 << 20).to_bytes(8, "little") + b"{}", "header"),
    "header just over the limit": (join(b"{" + b" " * HEADER_LIMIT, b""), "header"),
    "header beyond the end": ((4096).to_bytes(8, "little") + b"{}", "header"),
    "header of no bytes": (join(b"", b""), "header"),
    "not JSON": (join(b"{nope}", b""), "header"),
    "not an object": (join(b"[]", b""), "header"),
    "a pickle": (b"\x80\x04\x95" + bytes(100), "header"),
    "a zip": (b"PK\x03\x04" + bytes(100), "header"),
    "not UTF-8": (join(b'{"\xff":1}', b""), "header"),
    "text after the object": (join(b"{} {}", b""), "header"),
    "NaN in the header": (join(b'{"a":NaN}', b""), "header"),
    "a number of a million digits": (join(b'{"a":' + b"9" * 1_000_000 + b"}", b""), "header"),
    "nested 200,000 deep": (join(b'{"__metadata__":' + b"[" * 200_000, b""), "header"),
    "nested objects": (join(b'{"a":' * 150_000, b""), "header"),
    "a million empty objects": (join(b'{"a":[' + b"{}," * 300_000 + b"{}]}", b""), "header"),
    "hundreds of thousands of lists": (join(b'{"a":[' + b"[]," * 340_000 + b"[]]}", b""), "__metadata__"),
    "half a million numbers": (join(b'{"a":[' + b"1," * 500_000 + b"1]}", b""), "__metadata__"),
    "hundreds of thousands of names": (
        join(b"{" + b",".join(b'"%d":0' % n for n in range(100_000)) + b"}", b""),
        "header",
    ),
    "tens of thousands of tensors": (
        join({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(16_000)}, b""),
        "header",
    ),
    "a tensor twice": (doubled(b'"shift":', b'"shift":{},"shift":'), "header"),
    "metadata twice": (doubled(b'{"__metadata__":', b'{"__metadata__":{},"__metadata__":'), "header"),
    "a tensor's field twice": (doubled(b'"dtype":"F32"', b'"dtype":"I32","dtype":"F32"'), "header"),
    "a name twice, once escaped": (doubled(b'"shift":', b'"\\u0073hift":{},"shift":'), "header"),
    "no metadata": (changed(lambda d: d.pop("__metadata__")), "__metadata__"),
    "metadata that is no text": (changed(meta(cursor_tokens=41)), "__metadata__"),
    "metadata that is a list": (changed(lambda d: d.update(__metadata__=[])), "__metadata__"),
    "metadata missing": (changed(lambda d: d["__metadata__"].pop("ids")), "__metadata__"),
    "metadata not known": (changed(meta(extra="1")), "__metadata__"),
    "a newer format": (changed(meta(format="wkvm.state.2")), "format"),
    "tokens that are no count": (changed(meta(cursor_tokens="-1")), "cursor.tokens"),
    "tokens with a blank": (changed(meta(cursor_tokens="41\n")), "cursor.tokens"),
    "tokens beyond 63 bits": (changed(meta(cursor_tokens="9" * 19)), "cursor.tokens"),
    "more tokens than ids": (changed(meta(cursor_tokens="42")), "cursor.tokens"),
    "a tail that is no hex": (changed(meta(cursor_tail="0g")), "cursor.tail"),
    "a tail without end": (changed(meta(cursor_tail="00" * 5000)), "cursor.tail"),
    "an ids digest that is none": (changed(meta(ids="../../x")), "ids"),
    "ids of another digest": (changed(meta(ids="0" * 64)), "ids"),
    "ids beyond the vocabulary": (changed(nothing, lambda p: p[:-4] + b"\xff\xff\xff\xff"), IDS_TENSOR),
    "another model": (changed(meta(fingerprint_model="x")), "fingerprint.model"),
    "another layout": (changed(meta(fingerprint_layout="x")), "fingerprint.layout"),
    "other numerics": (changed(meta(fingerprint_numerics="x")), "fingerprint.numerics"),
    "a layout that is not its fingerprint's": (changed(meta(layout="[]")), "layout"),
    "half a character": (changed(meta(layout="\ud800")), "layout"),
    "a tensor missing": (changed(lambda d: d.pop("shift")), "tensor 'shift'"),
    "a tensor too many": (
        changed(lambda d: d.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
        "tensor 'x'",
    ),
    "a tensor that is a path": (
        changed(lambda d: d.update({"../../x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
        "tensor '../../x'",
    ),
    "tensors without size at one offset": (
        changed(lambda d: d.update({n: {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]} for n in ("y", "z")})),
        "tensor 'y'",
    ),
    "a dtype not known": (changed(entry(dtype="F4")), "tensor 'matrix'"),
    "a dtype that is no text": (changed(entry(dtype=3)), "tensor 'matrix'"),
    "another dtype of that size": (changed(entry(dtype="I32")), "tensor 'matrix'"),
    "another shape of that size": (changed(entry(shape=[3, 4, 4, 2])), "tensor 'matrix'"),
    "a negative dimension": (changed(entry(shape=[-3, -2, 4, 4])), "tensor 'matrix'"),
    "a shape whose product overflows": (changed(entry(shape=[1 << 62, 1 << 62, 16])), "tensor 'matrix'"),
    "a shape of true": (changed(lambda d: d["half"].update(shape=[True, 5])), "tensor 'half'"),
    "an offset of false": (changed(entry(data_offsets=[False, SIZE])), "tensor 'matrix'"),
    "a shape of rank 100,000": (changed(entry(shape=[1] * 100_000)), "tensor 'matrix'"),
    "a fraction": (changed(entry(shape=[3.0, 2, 4, 4])), "tensor 'matrix'"),
    "three offsets": (changed(entry(data_offsets=[0, 1, 2])), "tensor 'matrix'"),
    "a field too many": (changed(entry(strides=[1])), "tensor 'matrix'"),
    "a hole": (changed(entry(data_offsets=[4, SIZE + 4])), "tensor 'matrix'"),
    "an overlap": (changed(lambda d: d["shift"].update(data_offsets=[0, 54])), "tensor 'matrix'"),
    "too few bytes for a shape": (changed(entry(data_offsets=[0, SIZE - 4])), "tensor 'matrix'"),
    "offsets backwards": (changed(entry(data_offsets=[SIZE, 0])), "tensor 'matrix'"),
    "trailing bytes": (changed(nothing, lambda p: p + b"x"), "payload"),
    "a payload cut off": (changed(nothing, lambda p: p[:-1]), "payload"),
    "no payload": (changed(nothing, lambda p: b""), "payload"),
    "infinity": (changed(nothing, lambda p: b"\0\0\x80\x7f" + p[4:]), "tensor 'matrix'"),
    "no number": (changed(nothing, lambda p: p[: SIZE - 4] + b"\x01\0\x80\xff" + p[SIZE:]), "tensor 'matrix'"),
    "no number in bfloat16": (changed(nothing, lambda p: p[:SIZE] + b"\xff\x7f" + p[SIZE + 2 :]), "tensor 'shift'"),
    "infinity in float16": (changed(nothing, lambda p: p[: SIZE + 54] + b"\0\xfc" + p[SIZE + 56 :]), "tensor 'half'"),
    "infinity in float64": (
        changed(nothing, lambda p: p[: SIZE + 72] + b"\0" * 6 + b"\xf0\xff" + p[SIZE + 80 :]),
        "tensor 'wide'",
    ),
}
CODES = {
    "another model": ErrorCode.FINGERPRINT_MISMATCH,
    "another layout": ErrorCode.FINGERPRINT_MISMATCH,
    "a layout that is not its fingerprint's": ErrorCode.FINGERPRINT_MISMATCH,
    "half a character": ErrorCode.FINGERPRINT_MISMATCH,
    "other numerics": ErrorCode.NUMERICS_MISMATCH,
    "ids of another digest": ErrorCode.STATE_DAMAGED,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_and_the_refusal_names_what_is_wrong(name: str) -> None:
    file, part = HOSTILE[name]
    refused = refusal(file)
    assert refused.param == part
    assert refused.code is CODES.get(name, ErrorCode.BAD_STATE)
    assert refused.message.isascii()
    assert len(refused.message) < 400


def test_a_file_that_is_not_the_one_announced_is_damaged() -> None:
    file = flat_file()
    digest = digest_of(tenant_key("a"), (file,))
    flipped = bytearray(file)
    flipped[-len(IDS) - 1] ^= 1  # in whole numbers: finite, well formed, and only the digest knows
    check(bytes(flipped))
    with pytest.raises(Refused) as raised:
        check(bytes(flipped), digest)
    assert (raised.value.code, raised.value.param) == (ErrorCode.STATE_DAMAGED, "digest")


def test_a_value_that_is_not_finite_is_found_in_the_last_piece_of_a_large_tensor() -> None:
    family = msgspec.structs.replace(LAYOUT.families[0], shape=(600_000,), layers=1)
    layout = msgspec.structs.replace(LAYOUT, families=(family,))
    fingerprint = msgspec.structs.replace(FINGERPRINT, layout=layout.fingerprint)
    gate = Gate(layout, fingerprint, VOCAB_SIZE)
    head = encode_header(BlobHeader(layout, fingerprint, Cursor(tokens=1)))
    values = bytearray(4 * 600_000)
    gate.check(memoryview(head + values), tenant="a")
    values[4 * 599_999 : 4 * 600_000] = b"\0\0\x80\x7f"
    with pytest.raises(Refused, match="value 599999 is not finite"):
        gate.check(memoryview(head + values), tenant="a")


@given(st.integers(0, len(flat_file()) - 1), st.integers(1, 255))
@settings(deadline=None, max_examples=150)
def test_a_changed_byte_is_refused_or_leaves_a_well_formed_state(at: int, change: int) -> None:
    file = bytearray(flat_file())
    file[at] ^= change
    try:
        imported = check(bytes(file))
    except Refused:
        return
    assert imported.ids is None or bytes(imported.ids) == IDS
    assert [len(family) for family in imported.families] == [family.nbytes for family in LAYOUT.families]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from(
        ["__metadata__", "matrix", "shift", "dtype", "shape", "data_offsets", "layout", "ids", "cursor.tail"]
    ),
    JSON,
)
@settings(deadline=None, max_examples=200)
def test_any_value_in_the_place_of_any_other_is_refused_or_was_equal(place: str, value: Any) -> None:
    document, values = split(flat_file())
    holder = document
    if place not in document:
        holder = document["matrix"] if place in document["matrix"] else document["__metadata__"]
    if holder[place] == value:
        return
    holder[place] = value
    try:
        check(join(document, values))
    except Refused:
        return
    assert place == "cursor.tail", "only the tail may be anything"


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_noise_is_refused(noise: bytes) -> None:
    for file in (noise, join(noise, b""), join(b'{"__metadata__":' + noise + b"}", noise)):
        with pytest.raises(Refused):
            check(file)
