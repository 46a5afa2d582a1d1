"""The mixes on the GPU, in Triton: one program a token. Sums and norms are float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wkvm_core.kernels.launch import LAUNCH, PDL

_EPS = tl.constexpr(1e-5)


@triton.jit
def _norm(x, inside, weight, bias, C: tl.constexpr):
    mean = tl.sum(x, 0) / C
    away = tl.where(inside, x - mean, 0.0)
    return away * tl.rsqrt(tl.sum(away * away, 0) / C + _EPS) * weight + bias


@triton.jit
def _stream(x, parts, plane, token, c, inside, C: tl.constexpr, PARTS: tl.constexpr):
    """The residual stream at a token: x and the sum of PARTS products, in their order."""
    total = tl.load(x + token * C + c, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * plane + token * C + c, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _embed(tokens, table, weight, bias, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(weight + c, mask=inside, other=0.0)
    shift = tl.load(bias + c, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(table + tl.load(tokens + token) * C + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * C + c, _norm(x, inside, scale, shift, C), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _shift_mix(
    x,
    parts,
    plane,
    weight,
    bias,
    mixes,
    shift,
    slot_stride,
    read,
    write,
    bounds,
    row_of,
    last,
    x_out,
    out,
    tokens,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    MIXES: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """SINGLE: token i is row i. Otherwise the last u of each row goes to `last` `[rows, C]`: its slot may be the one
    that the row's first token reads."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(weight + c, mask=inside, other=0.0)
    offset = tl.load(bias + c, mask=inside, other=0.0)
    if SINGLE:
        row = token
        slot = tl.load(read + row)
        before = tl.load(shift + slot * slot_stride + c, mask=inside, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        total = _stream(x, parts, plane, token, c, inside, C, PARTS)
        u = _norm(total, inside, scale, offset, C)
        tl.store(shift + tl.load(write + row) * slot_stride + c, u, mask=inside)
    else:
        if PDL:
            gdc_wait()
        row = tl.load(row_of + token).to(tl.int64)
        total = _stream(x, parts, plane, token, c, inside, C, PARTS)
        u = _norm(total, inside, scale, offset, C)
        if token == tl.load(bounds + row):
            slot = tl.load(read + row)
            before = tl.load(shift + slot * slot_stride + c, mask=inside, other=0.0).to(tl.float32)
        else:
            earlier = _stream(x, parts, plane, token - 1, c, inside, C, PARTS)
            before = _norm(earlier, inside, scale, offset, C)
        if token + 1 == tl.load(bounds + row + 1):
            tl.store(last + row * C + c, u, mask=inside)
    tl.store(x_out + token * C + c, total, mask=inside)
    before -= u
    for mix in tl.static_range(MIXES):
        share = tl.load(mixes + mix * C + c, mask=inside, other=0.0)
        at = (mix * tokens.to(tl.int64) + token) * C
        tl.store(out + at + c, u + before * share, mask=inside)


@triton.jit
def _commit(
    last,
    other_last,
    shift,
    other_shift,
    slot_stride,
    write,
    bounds,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inside = c < C
    if tl.load(bounds + row) < tl.load(bounds + row + 1):
        slot = tl.load(write + row) * slot_stride
        tl.store(shift + slot + c, tl.load(last + row * C + c, mask=inside), mask=inside)
        tl.store(other_shift + slot + c, tl.load(other_last + row * C + c, mask=inside), mask=inside)


@triton.jit
def _final(
    x,
    parts,
    plane,
    weight,
    bias,
    wanted,
    out,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(weight + c, mask=inside, other=0.0)
    offset = tl.load(bias + c, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    token = tl.load(wanted + place)
    total = _stream(x, parts, plane, token, c, inside, C, PARTS)
    tl.store(out + place * C + c, _norm(total, inside, scale, offset, C), mask=inside)


def embed(
    tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> None:
    """out: float32 `[T, C]` = LN(table[token]); tokens: int64 `[T]`; table: `[V, C]`."""
    hidden = out.shape[1]
    block = triton.next_power_of_2(hidden)
    _embed[(out.shape[0],)](
        tokens, table, weight, bias, out, C=hidden, BLOCK=block, PDL=PDL, num_warps=_warps(block), **LAUNCH
    )


def shift_mix(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mixes: torch.Tensor,
    shift: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    x_out: torch.Tensor,
    out: torch.Tensor,
    *,
    bounds: torch.Tensor | None = None,
    row_of: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
) -> None:
    """See `ref.shift_mix`. x, x_out: float32 `[T, C]`, different tensors; parts: `[S, T, C]`, or None for nothing to
    add; mixes: float32 `[M, C]`; shift: `[slots, C]` of one layer, contiguous in C; out: `[M, T, C]`.

    With bounds int32 `[rows + 1]` and row_of int32 `[T]` rows have any number of tokens, and the u that each row leaves
    goes to last `[rows, C]`, for `commit`; without, token i is row i and it goes to its slot."""
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _shift_mix[(tokens,)](
        x,
        x if parts is None else parts,
        0 if parts is None else parts.stride(0),
        weight,
        bias,
        mixes,
        shift,
        shift.stride(0),
        read,
        write,
        read if bounds is None else bounds,
        read if row_of is None else row_of,
        x if last is None else last,
        x_out,
        out,
        tokens,
        C=hidden,
        BLOCK=block,
        PARTS=0 if parts is None else parts.shape[0],
        MIXES=mixes.shape[0],
        SINGLE=bounds is None,
        PDL=PDL,
        num_warps=_warps(block),
        **LAUNCH,
    )


def commit(
    last: tuple[torch.Tensor, torch.Tensor],
    shift: tuple[torch.Tensor, torch.Tensor],
    write: torch.Tensor,
    bounds: torch.Tensor,
) -> None:
    """`shift[write[row]] = last[row]` for both of a layer's shifts, of the rows that have tokens."""
    hidden = last[0].shape[1]
    block = triton.next_power_of_2(hidden)
    assert shift[0].stride(0) == shift[1].stride(0)
    _commit[(write.shape[0],)](
        *last, *shift, shift[0].stride(0), write, bounds, C=hidden, BLOCK=block, PDL=PDL, num_warps=4, **LAUNCH
    )


def final(
    x: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    wanted: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out: `[W, C]` = LN(x + parts) at the wanted places, int64 `[W]`."""
    hidden = x.shape[1]
    block = triton.next_power_of_2(hidden)
    _final[(out.shape[0],)](
        x,
        parts,
        parts.stride(0),
        weight,
        bias,
        wanted,
        out,
        C=hidden,
        BLOCK=block,
        PARTS=parts.shape[0],
        PDL=PDL,
        num_warps=_warps(block),
        **LAUNCH,
    )


def _warps(block: int) -> int:
    return min(max(block // 128, 1), 16)
