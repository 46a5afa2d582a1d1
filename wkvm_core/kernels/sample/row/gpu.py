"""Passes of one program over one row of logits.

A tile is `[BLOCK / 4, 4]` neighbouring ids, so that four of a thread's values are one load and their sums need no
exchange between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wkvm_core.kernels import lane as table

_IN_PROMPT = tl.constexpr(table.IN_PROMPT)
_BAN = tl.constexpr(table.BAN)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def tile_of(BLOCK: tl.constexpr):
    """int32 `[BLOCK / 4, 4]`: 0 to BLOCK - 1."""
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _best_of(top, at, VOCAB: tl.constexpr):
    """Greatest value and its lowest id."""
    best = tl.max(tl.max(top, 1), 0)
    return best, tl.min(tl.min(tl.where(top == best, at, VOCAB), 1), 0)


@triton.jit
def best(source, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Greatest value, float32, and its lowest id, int32. NaN counts as +inf."""
    tile = tile_of(BLOCK)
    top = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK // 4, 4], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        ids = start + tile
        x = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        is_better = x > top
        top = tl.where(is_better, x, top)
        at = tl.where(is_better, ids, at)
    return _best_of(top, at, VOCAB)


@triton.jit
def shape(
    source,
    target,
    counts,
    bias,
    stops,
    is_counted,
    is_biased,
    is_early,
    presence,
    frequency,
    repetition,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the row after penalties, bias and bans to `target`; the bans are lifted when they would leave nothing.
    Returns greatest value and its lowest id."""
    tile = tile_of(BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    tries = tl.zeros((), tl.int32)
    while (tries < 2) & (best == float("-inf")):
        top = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
        at = tl.zeros([BLOCK // 4, 4], tl.int32)
        for start in tl.range(0, VOCAB, BLOCK):
            ids = start + tile
            inside = ids < VOCAB
            x = tl.load(source + ids, mask=inside, other=float("-inf"))
            out = x == float("-inf")
            if is_counted:
                count = tl.load(counts + ids, mask=inside, other=0)
                again = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
                x = tl.where(count != 0, again, x)
                generated = count & (_IN_PROMPT - 1)
                present = (generated > 0).to(tl.float32)
                x = x - (presence * present + frequency * generated.to(tl.float32))
            if is_biased:
                own = tl.load(bias + ids, mask=inside, other=0.0)
                x = x + own
                out = out | ((own <= _BAN) & (tries == 0))
            if is_early & (tries == 0):
                out = out | (tl.load(stops + ids, mask=inside, other=0) != 0)
            x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
            x = tl.where(out, float("-inf"), x)
            tl.store(target + ids, x, mask=inside)
            is_better = x > top
            top = tl.where(is_better, x, top)
            at = tl.where(is_better, ids, at)
        best, token = _best_of(top, at, VOCAB)
        tries += 1
    tl.debug_barrier()
    return best, token
