from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_proto.columns import pack_f32, pack_u32, unpack_f32, unpack_u32


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_are_u32_little_endian(values: list[int]) -> None:
    assert pack_u32(values) == struct.pack(f"<{len(values)}I", *values)
    assert list(unpack_u32(pack_u32(values))) == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_numbers_are_f32_little_endian(values: list[float]) -> None:
    assert pack_f32(values) == struct.pack(f"<{len(values)}f", *values)
    assert list(unpack_f32(pack_f32(values))) == values


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_value_that_is_no_u32_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


def test_a_torn_column_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"abc")
    with pytest.raises(ValueError, match="multiple"):
        unpack_f32(b"abcde")
