"""What one slot holds: families of state, their places in the slot, and the fingerprint of that arrangement."""

from __future__ import annotations

import math

import msgspec
from blake3 import blake3

FAMILY_ALIGNMENT = 256
SLOT_ALIGNMENT = 4096
DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class StateFamily(msgspec.Struct, frozen=True):
    """One kind of state of a model (wkv matrix, token shift, conv tail, ...), the same for every layer that has it."""

    name: str
    shape: tuple[int, ...]
    """Of one layer of one session, without the layer axis."""
    dtype: str
    layers: int
    sharded_axis: int | None = None
    """Axis of `shape` that is split over ranks; None = every rank holds it whole."""
    is_matrix: bool = False
    """The last two axes are a matrix from keys to values that sums of other such matrices make sense of: what mutations
    act on."""

    @property
    def nbytes(self) -> int:
        """Bytes in one slot, all layers."""
        return self.layers * math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class StateLayout(msgspec.Struct, frozen=True):
    """All families of one model, in slot order. A slot is one contiguous range of `slot_bytes`."""

    families: tuple[StateFamily, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each family in its slot, multiples of 256."""
        offsets, end = [], 0
        for family in self.families:
            offsets.append(end)
            end += _round_up(family.nbytes, FAMILY_ALIGNMENT)
        return tuple(offsets)

    @property
    def slot_bytes(self) -> int:
        """Stride from slot to slot, a multiple of 4 KiB."""
        used = sum(_round_up(family.nbytes, FAMILY_ALIGNMENT) for family in self.families)
        return _round_up(max(used, 1), SLOT_ALIGNMENT)

    @property
    def fingerprint(self) -> str:
        """Hex blake3 of the families in order: the *layout* part of a snapshot's fingerprint."""
        return blake3(msgspec.json.encode(self.families)).hexdigest()


class Fingerprint(msgspec.Struct, frozen=True):
    """What a snapshot's bytes mean. Parts differ, refusals differ: see docs/architecture.md."""

    model: str
    """Hex blake3 over the canonical tensors, as stored in the checkpoint."""
    layout: str
    numerics: str
    """Compute dtype, quantisation, adapter."""

    def __str__(self) -> str:
        return f"{self.model}.{self.layout}.{self.numerics}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
