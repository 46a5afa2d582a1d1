"""Columns of numbers in frames: token ids travel as bytes, u32 or f32 little-endian, never as lists."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

assert array("I").itemsize == 4
_SWAP = sys.byteorder == "big"


def pack_u32(values: Iterable[int]) -> bytes:
    """u32 little-endian, 4 bytes a value. Raises OverflowError for a value outside 0..2**32-1."""
    column = array("I", values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack_u32(data: bytes | memoryview) -> array[int]:
    """The values of a u32 column. Raises ValueError when the length is not a multiple of 4."""
    column = array("I")
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column


def pack_f32(values: Iterable[float]) -> bytes:
    """f32 little-endian, 4 bytes a value."""
    column = array("f", values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack_f32(data: bytes | memoryview) -> array[float]:
    """The values of an f32 column. Raises ValueError when the length is not a multiple of 4."""
    column = array("f")
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column
