"""WKV-7 token by token, as the formula is written: the reference of every faster implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

_HEAD_SIZE = 64


class Wkv7:
    """The recurrence over the ragged rows of one launch, in the dtype of what it is given."""

    def __init__(self, planes: torch.Tensor, offsets: Sequence[int], read: torch.Tensor, write: torch.Tensor) -> None:
        self._planes = planes
        self._rows = list(zip(offsets[:-1], offsets[1:], read.tolist(), write.tolist(), strict=True))

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(self._planes[0])
        for start, end, read, write in self._rows:
            if start == end:
                continue
            matrix = state[read].clone()
            for token in range(start, end):
                r, k, v, w, a, b = self._planes[:6, token]
                removed = torch.einsum("hvk,hk->hv", matrix, a)
                matrix = matrix * w[:, None, :] + removed[:, :, None] * b[:, None, :] + v[:, :, None] * k[:, None, :]
                out[token] = torch.einsum("hvk,hk->hv", matrix, r)
            state[write] = matrix
        return out


def attend(
    state: torch.Tensor,
    offsets: Sequence[int],
    read: torch.Tensor,
    write: torch.Tensor,
    rkv: torch.Tensor,
    low: torch.Tensor,
    v_first: torch.Tensor,
    vectors: torch.Tensor,
    *,
    first: bool,
) -> torch.Tensor:
    """All that is done a head between the first products of a time mix and its last: decay, keys and gates prepared,
    state advanced, group norm, bonus and gate applied. Returns `[T, C]`.

    The tensors are those of `gpu.Wkv7.step`, all of one dtype, float32 or float64, in which everything is computed; the
    states of `state` and, by the first layer, `v_first` are replaced in place. Rows are those of `Wkv7`; one without
    tokens leaves its slots alone. Formulas: RWKV-7 "Goose" (BlinkDL), as in the reference `rwkv` package."""
    tokens, hidden = v_first.shape
    v0, w0, a0, k_k, k_a, r_k, norm_weight, norm_bias = vectors
    r, k, v = rkv
    v_gate, decay, rate, gate = low
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(w0 + decay))
    rate = torch.sigmoid(a0 + rate)
    if first:
        v_first.copy_(v)
    else:
        v = v + (v_first - v) * torch.sigmoid(v0 + v_gate)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(tokens, -1, _HEAD_SIZE)

    kk = functional.normalize(heads(k * k_k), dim=-1, eps=1e-12).view(tokens, hidden)
    k = k * (1.0 + (rate - 1.0) * k_a)
    planes = torch.stack([heads(x) for x in (r, k, v, w, -kk, kk * rate, torch.zeros_like(v))])
    y = Wkv7(planes, offsets, read, write)(state).view(tokens, hidden)
    normed = functional.group_norm(y, hidden // _HEAD_SIZE, norm_weight, norm_bias, _HEAD_SIZE * 1e-5)
    bonus = heads(r * k * r_k).sum(-1, keepdim=True) * heads(v)
    gated: torch.Tensor = (normed + bonus.view(tokens, hidden)) * gate
    return gated
