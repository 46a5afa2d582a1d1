"""The families of one snapshot in host memory, as arrays."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from wkvm_core.state.layout import StateFamily, StateLayout

Plane = npt.NDArray[np.float32]
_DTYPES: dict[str, type[np.floating]] = {"float32": np.float32, "float16": np.float16, "float64": np.float64}
FLOATS = frozenset((*_DTYPES, "bfloat16"))
_HALF_ULP, _LAST_BIT = np.uint32(0x7FFF), np.uint32(1)


class Planes:
    """A view of a block of `slot_bytes`; nothing is copied but what is asked for."""

    def __init__(self, layout: StateLayout, block: memoryview) -> None:
        self._places = dict(zip((family.name for family in layout.families), layout.offsets, strict=True))
        self._block = block

    def read(self, family: StateFamily) -> Plane:
        """float32 `[layers, *shape]`, a copy. The family is of floats."""
        shape = (family.layers, *family.shape)
        if family.dtype == "bfloat16":
            bits = self._raw(family, np.uint16).astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).reshape(shape)
        return self._raw(family, _DTYPES[family.dtype]).astype(np.float32).reshape(shape)

    def write(self, family: StateFamily, plane: Plane) -> None:
        """float32 `[layers, *shape]`, rounded to nearest even where the family has less."""
        flat = plane.reshape(-1)
        if family.dtype == "bfloat16":
            bits = np.ascontiguousarray(flat, np.float32).view(np.uint32)
            rounded = bits + _HALF_ULP + (bits >> np.uint32(16) & _LAST_BIT)
            quiet = bits >> np.uint32(16) | np.uint32(0x40)
            chosen = np.where(np.isnan(flat), quiet, rounded >> np.uint32(16))
            self._raw(family, np.uint16)[:] = chosen.astype(np.uint16)
        else:
            with np.errstate(over="ignore"):  # what does not fit is infinite, and seen to be
                self._raw(family, _DTYPES[family.dtype])[:] = flat

    def _raw(self, family: StateFamily, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        count = family.layers * math.prod(family.shape)
        return np.frombuffer(self._block, dtype, count, self._places[family.name])
