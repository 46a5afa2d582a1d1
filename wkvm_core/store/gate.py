"""The import gate: a foreign file is judged as bytes, before any library or device sees it."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from wkvm_core.errors import Refused
from wkvm_core.state.layout import Fingerprint, StateLayout
from wkvm_core.store.blob import (
    IDS_TENSOR,
    BlobHeader,
    RawHeader,
    TensorEntry,
    bad_state,
    clip,
    decode_header,
    header_size,
    ids_digest,
    parse_header,
    spans,
    table,
)
from wkvm_core.store.objects import PIECE, digest_of, tenant_key
from wkvm_proto.names import ErrorCode

_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""A float whose exponent is all ones is infinite or no number."""


class Imported(msgspec.Struct, frozen=True):
    """A file that passed the gate. Its views are of the caller's bytes."""

    header: BlobHeader
    """Without a digest of the ids when the file leaves them out."""
    families: tuple[memoryview, ...]
    """In the order of the layout."""
    ids: memoryview | None
    """u32 column of the ids that the state consumed; None when the file leaves them out."""

    def unpack(self, block: memoryview) -> None:
        """Writes the families to their places in the `slot_bytes` of a slot, gaps zero."""
        layout, end = self.header.layout, 0
        assert len(block) == layout.slot_bytes, f"{len(block)} bytes for a slot of {layout.slot_bytes}"
        for (start, stop), family in zip(spans(layout), self.families, strict=True):
            block[end:start] = bytes(start - end)
            block[start:stop] = family
            end = stop
        block[end:] = bytes(len(block) - end)


class Gate:
    """What the loaded model accepts: its layout, its fingerprint, ids of its vocabulary."""

    def __init__(self, layout: StateLayout, fingerprint: Fingerprint, vocab_size: int) -> None:
        self._layout = layout
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size

    def check(self, data: memoryview, *, tenant: str, digest: str = "") -> Imported:
        """Judges a whole file, the cheap looks first; memory stays flat, whatever the file says of itself.

        `digest`, if the caller gave one, must be the file's as this tenant has it. Refuses with `bad_state`,
        `fingerprint_mismatch`, `numerics_mismatch` or `state_damaged`; `param` is the part that is wrong.
        """
        begin = header_size(data[:8], len(data))
        raw = parse_header(data[8:begin])
        self._check_fingerprint(raw)
        self._check_table(raw, len(data) - begin)
        header = decode_header(raw)
        if digest and digest_of(tenant_key(tenant), (data,)) != digest:
            raise Refused(ErrorCode.STATE_DAMAGED, f"the file's digest is not {clip(digest)}", param="digest")
        payload = data[begin:]
        families = []
        for family in self._layout.families:
            entry = raw.tensors[family.name]
            families.append(payload[entry.begin : entry.end])
            _check_finite(family.name, entry, families[-1])
        ids = self._ids(header, raw, payload)
        if ids is None:
            header = msgspec.structs.replace(header, ids="")
        return Imported(header, tuple(families), ids)

    def _check_fingerprint(self, raw: RawHeader) -> None:
        for part in ("model", "layout", "numerics"):
            given, loaded = raw.meta[f"fingerprint.{part}"], getattr(self._fingerprint, part)
            if given != loaded:
                code = ErrorCode.NUMERICS_MISMATCH if part == "numerics" else ErrorCode.FINGERPRINT_MISMATCH
                message = f"the state's {part} is {clip(given)}, the loaded model's {clip(loaded)}"
                raise Refused(code, message, param=f"fingerprint.{part}")
        if raw.meta["layout"] != msgspec.json.encode(self._layout.families).decode():
            raise Refused(ErrorCode.FINGERPRINT_MISMATCH, "the layout is not that of its fingerprint", param="layout")

    def _check_table(self, raw: RawHeader, payload_bytes: int) -> None:
        """Exactly the model's tensors, one after the other in any order, up to the end of the file."""
        ids = raw.tensors.get(IDS_TENSOR)
        wanted = table(self._layout, None if ids is None else math.prod(ids.shape))
        for name in sorted(wanted.keys() ^ raw.tensors.keys()):
            wrong = "it is missing" if name in wanted else "the model has no such tensor"
            raise bad_state(f"tensor {clip(name)}", wrong)
        for name, entry in raw.tensors.items():
            want = wanted[name]
            if (entry.dtype, entry.shape) != (want.dtype, want.shape):
                found = f"{clip(entry.dtype)} {clip(str(list(entry.shape)))}"
                raise bad_state(f"tensor {clip(name)}", f"{found}; the model has {want.dtype} {list(want.shape)}")
        end = 0
        for name, entry in sorted(raw.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            want = wanted[name]
            if entry.end - entry.begin != want.end - want.begin:
                size = f"{entry.end - entry.begin} bytes for a tensor of {want.end - want.begin}"
                raise bad_state(f"tensor {clip(name)}", size)
            if entry.begin != end:
                raise bad_state(f"tensor {clip(name)}", f"it begins at {entry.begin}, the one before ends at {end}")
            end = entry.end
        if end != payload_bytes:
            raise bad_state("payload", f"{payload_bytes} bytes; the tensors take {end}")

    def _ids(self, header: BlobHeader, raw: RawHeader, payload: memoryview) -> memoryview | None:
        entry = raw.tensors.get(IDS_TENSOR)
        if entry is None:
            return None
        ids = payload[entry.begin : entry.end]
        if len(ids) // 4 != header.cursor.tokens:
            raise bad_state("cursor.tokens", f"{header.cursor.tokens} tokens, and {len(ids) // 4} ids")
        for start in range(0, len(ids), PIECE):
            largest = int(np.frombuffer(ids[start : start + PIECE], np.dtype("<u4")).max())
            if largest >= self._vocab_size:
                raise bad_state(IDS_TENSOR, f"id {largest}; the vocabulary has {self._vocab_size}")
        if ids_digest(ids) != header.ids:
            raise Refused(ErrorCode.STATE_DAMAGED, "the ids are not those of their digest", param="ids")
        return ids


def _check_finite(name: str, entry: TensorEntry, values: memoryview) -> None:
    """In pieces of 1 MiB; a whole number is always finite."""
    if entry.dtype not in _EXPONENTS:
        return
    word, exponent = _EXPONENTS[entry.dtype]
    mask = word(exponent)
    for start in range(0, len(values), PIECE):
        words = np.frombuffer(values[start : start + PIECE], np.dtype(word).newbyteorder("<"))
        odd = (words & mask) == mask
        if odd.any():
            index = start // words.itemsize + int(odd.argmax())
            raise bad_state(f"tensor {clip(name)}", f"value {index} is not finite")
