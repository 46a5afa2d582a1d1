"""A plan's rows as numbers: what kernels read of them, and what they have to consume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wkvm_core.kernels.lane import ASKS, FEED, GO, LANE, NUM_ROW_COLUMNS, PAUSE, SAMPLE
from wkvm_core.sched.plan import Row
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT

Numbers = npt.NDArray[np.int64]


def asks(row: Row) -> int:
    """The bits of ASKS."""
    return FEED * row.feed | SAMPLE * row.sample | GO * row.go | PAUSE * row.pause


def is_single(row: Row) -> bool:
    """It consumes one token."""
    return row.feed or len(row.tokens) == 4


def fill(rows: Sequence[Row], table: Numbers, asked: Numbers, idle: int) -> None:
    """READ, WRITE, LANE, TOKEN, ASKS of rows of one token, and ASKS again by itself; the rest of the table is rows of
    the idle lane, which do nothing.

    table: `[at least rows, 5]`; asked: as many; idle: number of that lane."""
    count = len(rows)
    if count:
        table[:count] = [
            (row.read, row.write, row.lane, int.from_bytes(row.tokens[:4], "little"), asks(row)) for row in rows
        ]
    table[count:] = _idle(idle)
    asked[:] = table[:, ASKS]


def _idle(lane: int) -> Numbers:
    row = np.zeros(NUM_ROW_COLUMNS, np.int64)
    row[:LANE] = ZERO_SLOT, SINK_SLOT
    row[LANE] = lane
    return row
