"""Products on the GPU, in Triton. Weights are `[out, in]`, as checkpoints have them; sums are float32.

A program owns a tile of outputs over the whole inner axis, or over one of SPLIT equal parts of it: then the parts come
out one by one, for the next kernel to add in order. No atomics: equal launches give equal bits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wkvm_core.kernels.launch import LAUNCH, PDL
from wkvm_core.kernels.project.groups import GRANULE, Group

_TANH, _SIGMOID, _RELU2 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: `rows` of activations by `columns` of outputs, `inner` numbers of 16 bits at a time."""

    rows: int
    columns: int
    inner: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    few: bool = False
    """By the kernel for very few tokens where there is one for the shape."""


@triton.jit
def _activated(y, act):
    if act == _RELU2:
        y = tl.where(y <= 0.0, 0.0, y * y)  # NaN stays
    if act == _SIGMOID:
        y = 1.0 / (1.0 + tl.exp(-y))
    if act == _TANH:
        y = 2.0 / (1.0 + tl.exp(-2.0 * y)) - 1.0
    return y


@triton.jit
def _added(a, b, total, IEEE: tl.constexpr):
    if IEEE:
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(b), total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _grouped(
    x,
    x_plane,
    x_row,
    weight,
    table,
    out,
    out_plane,
    out_row,
    tokens,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    ROUNDS: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,
    GRANULE: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """table: int32 `[N / GRANULE, 2]`, plane and activation of each granule of outputs."""
    m, n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = part * (ROUNDS * BLOCK_K) + tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
    entry = table + (n * BLOCK_N // GRANULE) * 2
    plane, act = tl.load(entry), tl.load(entry + 1)
    w_at = weight + columns.to(tl.int64)[:, None] * K + inner[None, :]
    if PDL:
        if AHEAD:
            lines = tl.minimum(tl.arange(0, LINES) * 64, ROUNDS * BLOCK_K - 64)
            line_at = weight + columns.to(tl.int64)[:, None] * K + part * (ROUNDS * BLOCK_K) + lines[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line_at], dtype=tl.int32, is_pure=False, pack=1
            )
        gdc_wait()
    x_at = x + plane.to(tl.int64) * x_plane + rows.to(tl.int64)[:, None] * x_row + inner[None, :]
    there = rows[:, None] < tokens
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(ROUNDS):
        a = tl.load(x_at, mask=there, other=0.0)
        b = tl.load(w_at)
        total = _added(a, b, total, IEEE)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if SPLIT == 1:
        total = _activated(total, act)
    at = out + part * out_plane + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(at, total, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _up(
    x,
    x_row,
    weight,
    out,
    out_plane,
    tokens,
    C: tl.constexpr,
    R: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    THIRD_END: tl.constexpr,
    ROUNDS: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Four products over neighbouring parts of the inner axis R, which end at the given places. ROUNDS is that of the
    longest part. With MANY tokens the others leave out what is behind their end; with few its loads are masked off, and
    all of them are on their way at once."""
    m, n, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
    start = tl.where(group == 0, 0, tl.where(group == 1, FIRST_END, tl.where(group == 2, SECOND_END, THIRD_END)))
    end = tl.where(group == 0, FIRST_END, tl.where(group == 1, SECOND_END, tl.where(group == 2, THIRD_END, R)))
    inner = tl.arange(0, BLOCK_K)
    w_at = weight + columns.to(tl.int64)[:, None] * R + inner[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * x_row + inner[None, :]
    there = rows[:, None] < tokens
    inside = columns < C
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PDL:
        gdc_wait()
    for number in range(ROUNDS):
        k = start + number * BLOCK_K
        if MANY:
            if k < end:
                a = tl.load(x_at + k, mask=there, other=0.0)
                b = tl.load(w_at + k, mask=inside[:, None], other=0.0)
                total = _added(a, b, total, IEEE)
        else:
            a = tl.load(x_at + k, mask=there & (inner[None, :] + k < end), other=0.0)
            b = tl.load(w_at + k, mask=inside[:, None] & (inner[None, :] + k < end), other=0.0)
            total = _added(a, b, total, IEEE)
    at = out + group.to(tl.int64) * out_plane + rows.to(tl.int64)[:, None] * C + columns[None, :]
    tl.store(at, total, mask=there & inside[None, :])


def table(groups: tuple[Group, ...], device: torch.device) -> torch.Tensor:
    """int32 `[N / GRANULE, 2]` on the device."""
    entries = [(group.plane, int(group.act)) for group in groups for _ in range(group.rows // GRANULE)]
    assert all(group.rows % GRANULE == 0 for group in groups), groups
    return torch.tensor(entries, dtype=torch.int32, device=device)


def grouped(
    x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, tile: Tile, *, ahead: bool = False
) -> None:
    """x: `[P, T, K]`; weight: `[N, K]` contiguous; granules: see `table`; out: `[split, T, N]`, float32 where split > 1
    (the activations then are not applied)."""
    tokens, (columns, inner) = x.shape[1], weight.shape
    share = inner // tile.split
    block = _inner(tile, share, weight.dtype)
    assert columns % tile.columns == 0 and share * tile.split == inner, (weight.shape, tile)
    _grouped[(triton.cdiv(tokens, tile.rows), columns // tile.columns, tile.split)](
        x,
        x.stride(0),
        x.stride(1),
        weight,
        granules,
        out,
        out.stride(0),
        out.stride(1),
        tokens,
        K=inner,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=block,
        SPLIT=tile.split,
        ROUNDS=share // block,
        LINES=triton.next_power_of_2(share // 64),
        AHEAD=ahead,
        GRANULE=GRANULE,
        IEEE=weight.dtype == torch.float32,
        PDL=PDL,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )


def up(x: torch.Tensor, weight: torch.Tensor, ends: tuple[int, int, int], out: torch.Tensor, tile: Tile) -> None:
    """x: `[T, R]`; weight: `[C, R]`, the four matrices side by side, the first three ending at `ends`, multiples of
    GRANULE as R is; out: `[4, T, C]`."""
    tokens, hidden = out.shape[1:]
    block = _inner(tile, GRANULE, weight.dtype)
    assert all(end % GRANULE == 0 for end in (*ends, weight.shape[1])), (ends, weight.shape)
    _up[(triton.cdiv(tokens, tile.rows), triton.cdiv(hidden, tile.columns), 4)](
        x,
        x.stride(0),
        weight,
        out,
        out.stride(0),
        tokens,
        C=hidden,
        R=weight.shape[1],
        FIRST_END=ends[0],
        SECOND_END=ends[1],
        THIRD_END=ends[2],
        ROUNDS=max(b - a for a, b in pairwise((0, *ends, weight.shape[1]))) // block,
        MANY=tile.rows > 64,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=block,
        IEEE=weight.dtype == torch.float32,
        PDL=PDL,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )


def _inner(tile: Tile, share: int, dtype: torch.dtype) -> int:
    """Numbers of the inner axis a round: the tile's, less where they do not divide it, or where they are float32."""
    inner = tile.inner * 2 // dtype.itemsize
    while share % inner:
        inner //= 2
    assert inner >= 16, (tile, share)
    return inner
