"""Rows that enter a step and requests that take their lanes, without a word from the device to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wkvm_core.kernels import lane as table

ROWS_OF_A_PROGRAM = 128
CLEARED_AT_ONCE = 4096
# A record that seats a lane begins with these int64; `numbers` and `knobs` follow, then int32: stop ids, biased ids,
# biases (the bits of float32), counted ids, counts.
LANE_OF_RECORD, STALE, NUM_STOPS, NUM_BIASES, NUM_COUNTS = range(5)
NUM_HEADS = 5
# Bits of STALE: what the lane's last owner left behind.
STALE_MARKS, STALE_BIAS, STALE_COUNTS = 1, 2, 4

_NUM_NUMBERS = tl.constexpr(table.NUM_NUMBERS)
_NUM_KNOBS = tl.constexpr(table.NUM_KNOBS)
_NUM_COLUMNS = tl.constexpr(table.NUM_ROW_COLUMNS)
_NEXT = tl.constexpr(table.NEXT)
_STATUS = tl.constexpr(table.STATUS)
_ACTIVE = tl.constexpr(table.ACTIVE)
_DONE = tl.constexpr(table.DONE)
_READ = tl.constexpr(table.READ)
_WRITE = tl.constexpr(table.WRITE)
_LANE = tl.constexpr(table.LANE)
_TOKEN = tl.constexpr(table.TOKEN)
_ASKS = tl.constexpr(table.ASKS)
_FEED = tl.constexpr(table.FEED)
_GO = tl.constexpr(table.GO)
_LANE_OF_RECORD = tl.constexpr(LANE_OF_RECORD)
_STALE = tl.constexpr(STALE)
_NUM_STOPS = tl.constexpr(NUM_STOPS)
_NUM_BIASES = tl.constexpr(NUM_BIASES)
_NUM_COUNTS = tl.constexpr(NUM_COUNTS)
_NUM_HEADS = tl.constexpr(NUM_HEADS)
_STALE_MARKS = tl.constexpr(STALE_MARKS)
_STALE_BIAS = tl.constexpr(STALE_BIAS)
_STALE_COUNTS = tl.constexpr(STALE_COUNTS)


def enter(
    rows: torch.Tensor,
    numbers: torch.Tensor,
    tokens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    lanes: torch.Tensor,
    *,
    zero_slot: int,
    sink_slot: int,
) -> None:
    """What rows of one token do in this step, once halts are lifted where a row says GO.

    rows: int64 `[rows, 5]`, READ, WRITE, LANE (-1 = none), TOKEN, ASKS; the others int64 `[rows]`, filled here. A row
    whose lane is halted or done reads the zero slot, writes the sink and gets token 0 and the idle lane.
    """
    assert rows.is_contiguous() and rows.shape[1] == table.NUM_ROW_COLUMNS
    grid = (triton.cdiv(len(rows), ROWS_OF_A_PROGRAM),)
    _enter[grid](
        rows,
        numbers,
        tokens,
        read,
        write,
        lanes,
        len(rows),
        len(numbers),
        zero_slot,
        sink_slot,
        BLOCK=ROWS_OF_A_PROGRAM,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_lanes", "zero_slot", "sink_slot"],
    do_not_specialize_on_alignment=["rows", "tokens", "read", "write", "lanes"],
)
def _enter(rows, numbers, tokens, read, write, lanes, num_rows, num_lanes, zero_slot, sink_slot, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    rows += row * _NUM_COLUMNS
    asks = tl.load(rows + _ASKS, mask=inside, other=0)
    lane = tl.load(rows + _LANE, mask=inside, other=0)
    lane = tl.where(lane < 0, lane + num_lanes, lane)
    numbers += lane * _NUM_NUMBERS
    status = tl.load(numbers + _STATUS, mask=inside, other=0)
    is_going = (asks & _GO) != 0
    status = tl.where(is_going, status & _DONE, status)
    tl.store(numbers + _STATUS, status, mask=inside & is_going)
    is_active = status == _ACTIVE
    fed = tl.load(numbers + _NEXT, mask=inside, other=0)
    token = tl.where((asks & _FEED) != 0, fed, tl.load(rows + _TOKEN, mask=inside, other=0))
    tl.store(tokens + row, tl.where(is_active, token, 0), mask=inside)
    tl.store(read + row, tl.where(is_active, tl.load(rows + _READ, mask=inside, other=0), zero_slot), mask=inside)
    tl.store(write + row, tl.where(is_active, tl.load(rows + _WRITE, mask=inside, other=0), sink_slot), mask=inside)
    tl.store(lanes + row, tl.where(is_active, lane, num_lanes - 2), mask=inside)


def seat(
    record: torch.Tensor,
    *,
    numbers: torch.Tensor,
    knobs: torch.Tensor,
    marks: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    stop_mark: int,
) -> None:
    """Loads a lane from its record, int64 `[words]`, after clearing what its last owner left. Tables as of `Lanes`;
    ids in the record are distinct."""
    items = record.view(torch.int32)
    _seat[(1,)](
        record,
        items,
        numbers,
        knobs,
        marks,
        counts,
        bias,
        stop_mark,
        marks.shape[1],
        BLOCK=CLEARED_AT_ONCE,
        num_warps=8,
    )


@triton.jit
def _clear(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        tl.store(row + ids, tl.zeros([BLOCK], tl.int32).to(row.dtype.element_ty), mask=ids < VOCAB)


@triton.jit(do_not_specialize=["stop_mark"], do_not_specialize_on_alignment=["record", "items"])
def _seat(record, items, numbers, knobs, marks, counts, bias, stop_mark, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.load(record + _LANE_OF_RECORD)
    stale = tl.load(record + _STALE)
    num_stops = tl.load(record + _NUM_STOPS).to(tl.int32)
    num_biases = tl.load(record + _NUM_BIASES).to(tl.int32)
    num_counts = tl.load(record + _NUM_COUNTS).to(tl.int32)
    column = tl.arange(0, 16)
    number = tl.load(record + _NUM_HEADS + column, mask=column < _NUM_NUMBERS, other=0)
    tl.store(numbers + lane * _NUM_NUMBERS + column, number, mask=column < _NUM_NUMBERS)
    knob = tl.load(record + _NUM_HEADS + _NUM_NUMBERS + column, mask=column < _NUM_KNOBS, other=0)
    tl.store(knobs + lane * _NUM_KNOBS + column, knob.to(tl.float64, bitcast=True), mask=column < _NUM_KNOBS)
    marks += lane * VOCAB
    counts += lane * VOCAB
    bias += lane * VOCAB
    if (stale & _STALE_MARKS) != 0:
        _clear(marks, VOCAB, BLOCK)
    if (stale & _STALE_BIAS) != 0:
        _clear(bias, VOCAB, BLOCK)
    if (stale & _STALE_COUNTS) != 0:
        _clear(counts, VOCAB, BLOCK)
    tl.debug_barrier()
    items += 2 * (_NUM_HEADS + _NUM_NUMBERS + _NUM_KNOBS)
    start = tl.zeros((), tl.int32)
    while start < num_stops:
        item = start + tl.arange(0, BLOCK)
        inside = item < num_stops
        start += BLOCK
        mark = (tl.zeros([BLOCK], tl.int32) + stop_mark).to(tl.uint8)
        tl.store(marks + tl.load(items + item, mask=inside, other=0), mark, mask=inside)
    items += num_stops
    start = tl.zeros((), tl.int32)
    while start < num_biases:
        item = start + tl.arange(0, BLOCK)
        inside = item < num_biases
        start += BLOCK
        value = tl.load(items + num_biases + item, mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(bias + tl.load(items + item, mask=inside, other=0), value, mask=inside)
    items += 2 * num_biases
    start = tl.zeros((), tl.int32)
    while start < num_counts:
        item = start + tl.arange(0, BLOCK)
        inside = item < num_counts
        start += BLOCK
        value = tl.load(items + num_counts + item, mask=inside, other=0)
        tl.store(counts + tl.load(items + item, mask=inside, other=0), value, mask=inside)
