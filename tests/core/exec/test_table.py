from __future__ import annotations

import numpy as np
import pytest

from wkvm_core.exec.table import Numbers, asks, fill, is_single
from wkvm_core.kernels.lane import ASKS, FEED, GO, LANE, NUM_ROW_COLUMNS, PAUSE, READ, SAMPLE, TOKEN, WRITE
from wkvm_core.sched.plan import Row
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT
from wkvm_proto.columns import pack_u32

IDLE = 9


def filled(rows: list[Row], size: int) -> tuple[Numbers, Numbers]:
    """Over what an earlier launch left there."""
    table, asked = np.full((size, NUM_ROW_COLUMNS), -7), np.full(size, -7)
    fill(rows, table, asked, IDLE)
    return table, asked


@pytest.mark.parametrize(
    ("row", "bits"),
    [
        (Row(1, 2, 2), 0),
        (Row(1, 2, 2, feed=True), FEED),
        (Row(1, 2, 2, sample=True), SAMPLE),
        (Row(1, 2, 2, go=True), GO),
        (Row(1, 2, 2, pause=True), PAUSE),
        (Row(1, 2, 2, feed=True, sample=True, go=True, pause=True), FEED | SAMPLE | GO | PAUSE),
    ],
)
def test_what_a_row_asks_is_a_bit_each(row: Row, bits: int) -> None:
    assert asks(row) == bits


@pytest.mark.parametrize(
    ("tokens", "feed", "single"),
    [([], True, True), ([5], False, True), ([5, 6], False, False), ([5] * 9, False, False)],
)
def test_a_row_is_single_when_it_consumes_one_token(tokens: list[int], feed: bool, single: bool) -> None:
    assert is_single(Row(1, 2, 3, 4, tokens=pack_u32(tokens), feed=feed)) is single


def test_each_row_has_its_slots_lane_token_and_wishes() -> None:
    rows = [
        Row(1, 5, 6, 3, tokens=pack_u32([2**31 + 7]), sample=True),
        Row(2, 8, 8, 4, feed=True, sample=True, pause=True),
    ]
    table, asked = filled(rows, 2)
    assert table[:, READ].tolist() == [5, 8]
    assert table[:, WRITE].tolist() == [6, 8]
    assert table[:, LANE].tolist() == [3, 4]
    assert table[:, TOKEN].tolist() == [2**31 + 7, 0]
    assert table[:, ASKS].tolist() == asked.tolist() == [SAMPLE, FEED | SAMPLE | PAUSE]


def test_a_longer_row_is_told_by_its_first_token() -> None:
    table, _ = filled([Row(1, 5, 6, 3, tokens=pack_u32([11, 12, 13]))], 1)
    assert table[0, TOKEN] == 11


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_rest_of_the_table_reads_zero_writes_the_sink_and_asks_nothing(count: int) -> None:
    table, asked = filled([Row(k, 5 + k, 5 + k, k, feed=True, sample=True) for k in range(count)], 4)
    padding = [0] * NUM_ROW_COLUMNS
    padding[READ], padding[WRITE], padding[LANE] = ZERO_SLOT, SINK_SLOT, IDLE
    assert table[count:].tolist() == [padding] * (4 - count)
    assert asked[count:].tolist() == [0] * (4 - count)
