"""WKV-7 on the GPU, in Triton: one fused decode step, and a token-by-token scan for rows of several tokens.

State is addressed as `state + slot * slot_stride` in int64, `[64 (value), 64 (key)]` a head; all arithmetic is float32.
A program reads its part of a state once and writes it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wkvm_core.kernels.launch import LAUNCH, PDL

HEAD_SIZE = 64
_DECAY_SCALE = tl.constexpr(-0.6065306597126334)  # -exp(-1/2)
_HEAD_EPS = tl.constexpr(64e-5)
# Rows of `vectors`.
_V0, _W0, _A0, _K_K, _K_A, _R_K, _LN_WEIGHT, _LN_BIAS = (tl.constexpr(n) for n in range(8))
NUM_VECTORS = 8


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _keys(k, rate, k_k, k_a):
    """Removal key -kk, its counterpart kk * a, and the key that is written; over the last axis of 64."""
    kk = k * k_k
    kk = kk / tl.maximum(tl.sqrt(tl.sum(kk * kk, axis=-1, keep_dims=True)), 1e-12)
    return -kk, kk * rate, k * (1.0 + (rate - 1.0) * k_a)


@triton.jit
def _advance(matrix, r, k, v, w, a, b):
    """One token on `[values, 64]`; a..w are `[64]`, v `[values]`."""
    removed = tl.sum(matrix * a[None, :], 1)
    matrix = matrix * w[None, :] + removed[:, None] * b[None, :] + v[:, None] * k[None, :]
    return matrix, tl.sum(matrix * r[None, :], 1)


@triton.jit
def _hashed(x, place):
    mixed = (x.to(tl.uint32, bitcast=True) ^ ((place + 1).to(tl.uint32) * 0x9E3779B1)) * 0x85EBCA6B
    return mixed ^ (mixed >> 15)


@triton.jit
def _rounded(matrix, k, v, key, value, DITHER: tl.constexpr):
    """What of float32 is stored in 16 bits: with DITHER, rounded up with the probability of the part cut off. The
    random bits are a hash of the token's value and key and the element's place, so equal inputs give equal states."""
    if DITHER > 0:
        mixed = (_hashed(v, value + 64)[:, None] ^ _hashed(k, key)[None, :]) * 0xC2B2AE35
        bits = matrix.to(tl.uint32, bitcast=True) + (mixed >> (32 - DITHER))
        matrix = (bits >> DITHER << DITHER).to(tl.float32, bitcast=True)
    return matrix


@triton.jit
def _step(
    state,
    slot_stride,
    read,
    write,
    rkv,
    rkv_plane,
    rkv_row,
    low,
    low_plane,
    low_row,
    v_first,
    vectors,
    out,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    DITHER: tl.constexpr,
    PDL: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key = tl.arange(0, 64)
    value = tl.arange(0, 64)
    place = head * 4096 + value[:, None] * 64 + key[None, :]
    c_key, c_value = head * 64 + key, head * 64 + value
    if PDL:
        gdc_launch_dependents()
    # Slots and states are older than the launch before this one; so are the vectors.
    matrix = tl.load(state + tl.load(read + row) * slot_stride + place).to(tl.float32)
    w0 = tl.load(vectors + _W0 * C + c_key)
    a0 = tl.load(vectors + _A0 * C + c_key)
    k_k = tl.load(vectors + _K_K * C + c_key)
    k_a = tl.load(vectors + _K_A * C + c_key)
    r_k = tl.load(vectors + _R_K * C + c_key)
    weight = tl.load(vectors + _LN_WEIGHT * C + c_value)
    bias = tl.load(vectors + _LN_BIAS * C + c_value)
    if PDL:
        gdc_wait()
    rkv += row * rkv_row
    low += row * low_row
    r = tl.load(rkv + c_key).to(tl.float32)
    k = tl.load(rkv + rkv_plane + c_key).to(tl.float32)
    v = tl.load(rkv + 2 * rkv_plane + c_value).to(tl.float32)
    w = tl.exp(_sigmoid(w0 + tl.load(low + low_plane + c_key).to(tl.float32)) * _DECAY_SCALE)
    rate = _sigmoid(a0 + tl.load(low + 2 * low_plane + c_key).to(tl.float32))
    gate = tl.load(low + 3 * low_plane + c_value).to(tl.float32)
    if FIRST:
        tl.store(v_first + row * C + c_value, v)
    else:
        first = tl.load(v_first + row * C + c_value).to(tl.float32)
        v0 = tl.load(vectors + _V0 * C + c_value)
        v += (first - v) * _sigmoid(v0 + tl.load(low + c_value).to(tl.float32))
    a, b, k = _keys(k, rate, k_k, k_a)
    matrix, y = _advance(matrix, r, k, v, w, a, b)
    matrix = _rounded(matrix, k, v, key, value, DITHER)
    tl.store(state + tl.load(write + row) * slot_stride + place, matrix)
    mean = tl.sum(y, 0) / 64
    y -= mean
    y = y * tl.rsqrt(tl.sum(y * y, 0) / 64 + _HEAD_EPS) * weight + bias
    y += tl.sum(r * k * r_k, 0) * v
    tl.store(out + row * C + c_value, y * gate)


@triton.jit(do_not_specialize=["tokens"])
def _prepare(
    rkv,
    rkv_plane,
    rkv_row,
    low,
    low_plane,
    low_row,
    v_first,
    vectors,
    planes,
    decay,
    tokens,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """planes: `[5, tokens, C]` r, k, v, a, b as the scan takes them; decay: `[tokens, C]` w."""
    token = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = c < C
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rkv += token * rkv_row
    low += token * low_row
    r = tl.load(rkv + c, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(rkv + rkv_plane + c, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(rkv + 2 * rkv_plane + c, mask=inside, other=0.0).to(tl.float32)
    w0 = tl.load(vectors + _W0 * C + c, mask=inside, other=0.0)
    a0 = tl.load(vectors + _A0 * C + c, mask=inside, other=0.0)
    w = tl.exp(_sigmoid(w0 + tl.load(low + low_plane + c, mask=inside, other=0.0).to(tl.float32)) * _DECAY_SCALE)
    rate = _sigmoid(a0 + tl.load(low + 2 * low_plane + c, mask=inside, other=0.0).to(tl.float32))
    if FIRST:
        tl.store(v_first + token * C + c, v, mask=inside)
    else:
        first = tl.load(v_first + token * C + c, mask=inside, other=0.0).to(tl.float32)
        v0 = tl.load(vectors + _V0 * C + c, mask=inside, other=0.0)
        v += (first - v) * _sigmoid(v0 + tl.load(low + c, mask=inside, other=0.0).to(tl.float32))
    k_k = tl.load(vectors + _K_K * C + c, mask=inside, other=0.0)
    k_a = tl.load(vectors + _K_A * C + c, mask=inside, other=0.0)
    a, b, k = _keys(k, rate, k_k, k_a)
    plane = tokens.to(tl.int64) * C
    at = token * C + c
    tl.store(planes + at, r, mask=inside)
    tl.store(planes + plane + at, k, mask=inside)
    tl.store(planes + 2 * plane + at, v, mask=inside)
    tl.store(planes + 3 * plane + at, a, mask=inside)
    tl.store(planes + 4 * plane + at, b, mask=inside)
    tl.store(decay + at, w, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    state,
    slot_stride,
    read,
    write,
    bounds,
    planes,
    decay,
    tokens,
    out,
    C: tl.constexpr,
    VALUES: tl.constexpr,
    DITHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows' tokens in order; out: `[tokens, C]` y. Rows without tokens leave their slots alone."""
    PARTS: tl.constexpr = 64 // VALUES
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row = tl.program_id(1)
    key = tl.arange(0, 64)
    value = part * VALUES + tl.arange(0, VALUES)
    place = head * 4096 + value[:, None] * 64 + key[None, :]
    c_key, c_value = head * 64 + key, head * 64 + value
    if PDL:
        gdc_launch_dependents()
    start, end = tl.load(bounds + row).to(tl.int64), tl.load(bounds + row + 1).to(tl.int64)
    if start < end:
        matrix = tl.load(state + tl.load(read + row) * slot_stride + place).to(tl.float32)
        if PDL:
            gdc_wait()
        plane = tokens.to(tl.int64) * C
        r_at, k_at, v_at = planes + c_key, planes + plane + c_key, planes + 2 * plane + c_value
        a_at, b_at = planes + 3 * plane + c_key, planes + 4 * plane + c_key
        k = tl.load(k_at + start * C).to(tl.float32)
        v = tl.load(v_at + start * C).to(tl.float32)
        token = start
        while token < end:
            r = tl.load(r_at + token * C).to(tl.float32)
            k = tl.load(k_at + token * C).to(tl.float32)
            v = tl.load(v_at + token * C).to(tl.float32)
            a = tl.load(a_at + token * C).to(tl.float32)
            b = tl.load(b_at + token * C).to(tl.float32)
            w = tl.load(decay + token * C + c_key)
            matrix, y = _advance(matrix, r, k, v, w, a, b)
            tl.store(out + token * C + c_value, y)
            token += 1
        matrix = _rounded(matrix, k, v, key, value, DITHER)
        tl.store(state + tl.load(write + row) * slot_stride + place, matrix)
    else:
        if PDL:
            gdc_wait()


@triton.jit(do_not_specialize=["tokens"])
def _finish(
    y,
    planes,
    low,
    low_plane,
    low_row,
    vectors,
    out,
    tokens,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Group norm, bonus and gate of y `[tokens, C]`."""
    token = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = c < C
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = token * C + c
    x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    plane = tokens.to(tl.int64) * C
    r = tl.load(planes + at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(planes + plane + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(planes + 2 * plane + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(low + token * low_row + 3 * low_plane + c, mask=inside, other=0.0).to(tl.float32)
    r_k = tl.load(vectors + _R_K * C + c, mask=inside, other=0.0)
    weight = tl.load(vectors + _LN_WEIGHT * C + c, mask=inside, other=0.0)
    bias = tl.load(vectors + _LN_BIAS * C + c, mask=inside, other=0.0)
    x -= (tl.sum(x, 1) / 64)[:, None]
    x = x * tl.rsqrt(tl.sum(x * x, 1) / 64 + _HEAD_EPS)[:, None] * weight + bias
    x += tl.sum(r * k * r_k, 1)[:, None] * v
    tl.store(out + at, x * gate, mask=inside)


_CUT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits of float32 that a state of this dtype cuts off."""


class Wkv7:
    """The state's operations, for states of one dtype."""

    def __init__(self, state_dtype: torch.dtype, *, dither: bool = True) -> None:
        """dither: stochastic rounding of a 16-bit state."""
        self._bits = _CUT_BITS[state_dtype] if dither else 0

    def step(
        self,
        state: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        rkv: torch.Tensor,
        low: torch.Tensor,
        v_first: torch.Tensor,
        vectors: torch.Tensor,
        out: torch.Tensor,
        *,
        first: bool,
    ) -> None:
        """One token a row: decay, keys and gates prepared, state advanced, group norm, bonus and gate applied.

        state: `[slots, H, 64, 64]` of one layer, float32 or 16 bits, contiguous but for the slot; read, write: int64
        `[T]`; rkv: `[3, T, C]` and low: `[4, T, C]` (v, w, a, g before their sigmoids), any strides but 1 in C;
        v_first: `[T, C]`, written by the first layer, read by the others; vectors: float32 `[8, C]`, v0, w0, a0, k_k,
        k_a, r_k and the group norm's weight and bias; out: `[T, C]`."""
        heads = state.shape[1]
        _step[(heads, out.shape[0])](
            state,
            state.stride(0),
            read,
            write,
            rkv,
            rkv.stride(0),
            rkv.stride(1),
            low,
            low.stride(0),
            low.stride(1),
            v_first,
            vectors,
            out,
            C=heads * HEAD_SIZE,
            FIRST=first,
            DITHER=self._bits,
            PDL=PDL,
            num_warps=4,
            **LAUNCH,
        )

    def scan(
        self,
        state: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        bounds: torch.Tensor,
        planes: torch.Tensor,
        decay: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Advances rows of any number of tokens, one token after another: row i owns tokens `bounds[i]:bounds[i + 1]`,
        int32 `[rows + 1]`; one without tokens leaves its slots alone. y: `[T, C]`, the read-out."""
        tokens, hidden = decay.shape
        values = 16
        _scan[(hidden // values, read.shape[0])](
            state,
            state.stride(0),
            read,
            write,
            bounds,
            planes,
            decay,
            tokens,
            y,
            C=hidden,
            VALUES=values,
            DITHER=self._bits,
            PDL=PDL,
            num_warps=4,
            **LAUNCH,
        )


def prepare(
    rkv: torch.Tensor,
    low: torch.Tensor,
    v_first: torch.Tensor,
    vectors: torch.Tensor,
    planes: torch.Tensor,
    decay: torch.Tensor,
    *,
    first: bool,
) -> None:
    """What `scan` takes, of the same tensors as `step`: planes `[5, T, C]` r, k, v, a, b; decay float32 `[T, C]`."""
    tokens, hidden = decay.shape
    grid, block = _by_heads(tokens, hidden)
    _prepare[grid](
        rkv,
        rkv.stride(0),
        rkv.stride(1),
        low,
        low.stride(0),
        low.stride(1),
        v_first,
        vectors,
        planes,
        decay,
        tokens,
        C=hidden,
        HEADS=block,
        FIRST=first,
        PDL=PDL,
        num_warps=4,
        **LAUNCH,
    )


def finish(
    y: torch.Tensor,
    planes: torch.Tensor,
    low: torch.Tensor,
    vectors: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Group norm, bonus and gate of the read-out y: out `[T, C]`."""
    tokens, hidden = out.shape
    grid, block = _by_heads(tokens, hidden)
    _finish[grid](
        y,
        planes,
        low,
        low.stride(0),
        low.stride(1),
        vectors,
        out,
        tokens,
        C=hidden,
        HEADS=block,
        PDL=PDL,
        num_warps=4,
        **LAUNCH,
    )


def _by_heads(tokens: int, hidden: int) -> tuple[tuple[int, int], int]:
    """Grid and heads of a program, for what treats each head of each token alone."""
    heads = hidden // HEAD_SIZE
    block = min(triton.next_power_of_2(heads), 16)
    return (tokens, triton.cdiv(heads, block)), block
