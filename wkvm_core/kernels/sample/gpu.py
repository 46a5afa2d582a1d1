"""The sampler as one launch: a program a row, from its logits to the token, the flags and the lane that moves on.

It gives what `wkvm_core.kernels.draw` defines, bit by bit, up to the device's own float32 exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wkvm_core.kernels import lane as table
from wkvm_core.kernels.sample.cut.gpu import cut_by_count, cut_by_weight, draw, following_edge, whole
from wkvm_core.kernels.sample.row.gpu import best, shape

BLOCK = 4096
"""Logits that a program takes at a time."""
NUM_WARPS = 16
_MANY_ROWS = 512
"""Rows from which smaller programs are faster: there are more of them than the card runs at once."""

_NEXT = tl.constexpr(table.NEXT)
_POSITION = tl.constexpr(table.POSITION)
_REMAINING = tl.constexpr(table.REMAINING)
_STATUS = tl.constexpr(table.STATUS)
_STOPS = tl.constexpr(table.STOPS)
_HALTS = tl.constexpr(table.HALTS)
_KEY = tl.constexpr(table.KEY)
_MIN_TOKENS = tl.constexpr(table.MIN_TOKENS)
_NEEDS = tl.constexpr(table.NEEDS)
_TOP_K = tl.constexpr(table.TOP_K)
_NUM_NUMBERS = tl.constexpr(table.NUM_NUMBERS)
_SHARPNESS = tl.constexpr(table.SHARPNESS)
_TOP_P = tl.constexpr(table.TOP_P)
_MIN_P = tl.constexpr(table.MIN_P)
_PRESENCE = tl.constexpr(table.PRESENCE)
_FREQUENCY = tl.constexpr(table.FREQUENCY)
_REPETITION = tl.constexpr(table.REPETITION)
_EDGE = tl.constexpr(table.EDGE)
_NUM_KNOBS = tl.constexpr(table.NUM_KNOBS)
_ACTIVE = tl.constexpr(table.ACTIVE)
_LAST = tl.constexpr(table.LAST)
_PAUSED = tl.constexpr(table.PAUSED)
_BROKEN = tl.constexpr(table.BROKEN)
_INTO_TOKEN = tl.constexpr(table.INTO_TOKEN)
_FLAGS = tl.constexpr(table.FLAGS)
_ADD_POSITION = tl.constexpr(table.ADD_POSITION)
_ADD_REMAINING = tl.constexpr(table.ADD_REMAINING)
_ADD_STATUS = tl.constexpr(table.ADD_STATUS)
_NUM_OUTCOMES = tl.constexpr(table.NUM_OUTCOMES)
_SAMPLED = tl.constexpr(table.SAMPLED)
_RANKED = tl.constexpr(table.RANKED)
_TYPICAL = tl.constexpr(table.TYPICAL)
_COUNTED = tl.constexpr(table.COUNTED)
_BIASED = tl.constexpr(table.BIASED)
_DELAYED = tl.constexpr(table.DELAYED)
_SHAPED = tl.constexpr(table.COUNTED | table.BIASED | table.DELAYED)
_SAMPLE = tl.constexpr(table.SAMPLE)
_PAUSE = tl.constexpr(table.PAUSE)
_LEFT_OVER = tl.constexpr(table.LEFT_OVER)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def cut_for(rows: int) -> tuple[int, int]:
    """Block and warps of a program; measured on an H200."""
    return (BLOCK // 2, NUM_WARPS // 2) if rows >= _MANY_ROWS else (BLOCK, NUM_WARPS)


def sample(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    asks: torch.Tensor,
    out: torch.Tensor,
    *,
    numbers: torch.Tensor,
    knobs: torch.Tensor,
    marks: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    outcomes: torch.Tensor,
    shaped: torch.Tensor,
    ranks: torch.Tensor,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> None:
    """Samples each row and moves its lane on. Reads nothing on the host and allocates nothing.

    logits: float32 `[rows, vocab]`, contiguous within a row, any stride between rows; lanes, asks: int64 `[rows]`,
    each lane at most once but for those that are not active, which nothing happens to; out: int64 `[2, rows]`, gets
    tokens and flags. Tables as of `Lanes`.
    shaped: float32, ranks: int32, both `[at least rows, vocab]`, hold nothing between calls.

    A lane that needs typical-p is left as it is, its token LEFT_OVER and its flags 0. A row that does not ask to be
    sampled gets token -1 and RAN.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and out.is_contiguous() and len(shaped) >= num_rows <= len(ranks)
    assert lanes.is_contiguous() and asks.is_contiguous()
    _sample[(num_rows,)](
        logits,
        logits.stride(0),
        lanes,
        asks,
        out,
        numbers,
        knobs,
        marks,
        counts,
        bias,
        outcomes,
        shaped,
        ranks,
        num_rows,
        len(numbers),
        VOCAB=vocab_size,
        BLOCK=block,
        NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        num_warps=num_warps,
        enable_fp_fusion=False,  # the penalties round after each operation, as torch's do
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_lanes"],
    do_not_specialize_on_alignment=["lanes", "asks", "out"],
)
def _sample(
    logits,
    logits_row,
    lanes,
    asks,
    out,
    numbers,
    knobs,
    marks,
    counts,
    bias,
    outcomes,
    shaped,
    ranks,
    num_rows,
    num_lanes,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    lane = tl.where(lane < 0, lane + num_lanes, lane)
    ask = tl.load(asks + row)
    numbers += lane * _NUM_NUMBERS
    knobs += lane * _NUM_KNOBS
    status = tl.load(numbers + _STATUS)
    is_active = status == _ACTIVE
    is_asked = (ask & _SAMPLE) != 0
    needs = tl.load(numbers + _NEEDS)
    is_left = (needs & _TYPICAL) != 0
    token = tl.where(is_active & is_asked & is_left, _LEFT_OVER, -1).to(tl.int64)
    ran = tl.load(outcomes + _FLAGS)
    flags = tl.where(is_active & (is_asked == 0), ran, tl.zeros_like(ran))
    if is_active & is_asked & (is_left == 0):
        source = logits + row * logits_row
        position = tl.load(numbers + _POSITION)
        raw, chosen = best(source, VOCAB, BLOCK)
        is_sound = tl.abs(raw) <= _LARGEST
        if is_sound & ((needs & (_SHAPED | _SAMPLED)) != 0):
            top = raw
            if (needs & _SHAPED) != 0:
                target = shaped + row * VOCAB
                top, chosen = shape(
                    source,
                    target,
                    counts + lane * VOCAB,
                    bias + lane * VOCAB,
                    marks + tl.load(numbers + _STOPS),
                    (needs & _COUNTED) != 0,
                    (needs & _BIASED) != 0,
                    ((needs & _DELAYED) != 0) & (position < tl.load(numbers + _MIN_TOKENS)),
                    tl.load(knobs + _PRESENCE).to(tl.float32),
                    tl.load(knobs + _FREQUENCY).to(tl.float32),
                    tl.load(knobs + _REPETITION).to(tl.float32),
                    VOCAB,
                    BLOCK,
                )
                source = target
            if (needs & _SAMPLED) != 0:
                sharpness = tl.load(knobs + _SHARPNESS).to(tl.float32)
                space = ranks + row * VOCAB
                cut, last = whole(VOCAB)
                if (needs & _RANKED) != 0:
                    top_k = tl.load(numbers + _TOP_K)
                    if (top_k > 0) & (top_k < VOCAB):
                        cut, last = cut_by_count(source, space, top, sharpness, cut, last, top_k, VOCAB, BLOCK)
                    top_p = tl.load(knobs + _TOP_P)
                    if top_p < 1.0:
                        edge = tl.load(knobs + _EDGE).to(tl.float32)
                        cut, last = cut_by_weight(source, space, top, sharpness, cut, last, top_p, edge, VOCAB, BLOCK)
                        tl.store(knobs + _EDGE, following_edge(edge, top, sharpness, cut).to(tl.float64))
                chosen = draw(
                    source,
                    top,
                    sharpness,
                    cut,
                    last,
                    tl.load(knobs + _MIN_P).to(tl.float32),
                    tl.load(numbers + _KEY),
                    position,
                    VOCAB,
                    BLOCK,
                    NUM_BLOCKS,
                )
        token = chosen.to(tl.int64)
        remaining = tl.load(numbers + _REMAINING)
        mark = tl.load(marks + tl.load(numbers + _STOPS) + token) | tl.load(marks + tl.load(numbers + _HALTS) + token)
        code = mark.to(tl.int64) + status + tl.where(remaining <= 1, _LAST, 0)
        code += tl.where((ask & _PAUSE) != 0, _PAUSED, 0) + tl.where(is_sound, 0, _BROKEN)
        outcomes += code * _NUM_OUTCOMES
        add_position = tl.load(outcomes + _ADD_POSITION)
        if add_position != 0:
            tl.store(numbers + _NEXT, token)
            if (needs & _COUNTED) != 0:
                place = counts + lane * VOCAB + token
                tl.store(place, tl.load(place) + 1)
        tl.store(numbers + _POSITION, position + add_position)
        tl.store(numbers + _REMAINING, remaining + tl.load(outcomes + _ADD_REMAINING))
        tl.store(numbers + _STATUS, status + tl.load(outcomes + _ADD_STATUS))
        token |= tl.load(outcomes + _INTO_TOKEN)
        flags = tl.load(outcomes + _FLAGS)
    tl.store(out + row, token)
    tl.store(out + num_rows + row, flags)
