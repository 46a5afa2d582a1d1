"""The same, as the formulas are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional


def embed(tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LN(table[token]): `[T, C]` in the dtype of the weight."""
    return functional.layer_norm(table[tokens].to(weight.dtype), weight.shape, weight, bias, 1e-5)


def shift_mix(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mixes: torch.Tensor,
    shift: torch.Tensor,
    offsets: Sequence[int],
    read: torch.Tensor,
    write: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[T, C]` plus the sum of parts `[S, T, C]`; its norm u mixed with the token before, u + mixes * (u' - u):
    `[M, T, C]`. Row i owns tokens `offsets[i]:offsets[i + 1]`; its first one follows `shift[read[i]]`, its last u goes
    to `shift[write[i]]`. A row without tokens leaves its slots alone."""
    if parts is not None:
        x = x + parts.to(x.dtype).sum(0)
    u = functional.layer_norm(x, weight.shape, weight, bias, 1e-5)
    before = torch.cat((u[:1], u[:-1])).clone()
    rows = [row for row, (start, end) in enumerate(pairwise(offsets)) if start < end]
    before[[offsets[row] for row in rows]] = shift[read[rows]].to(u.dtype)
    shift[write[rows]] = u[[offsets[row + 1] - 1 for row in rows]].to(shift.dtype)
    return x, u + mixes[:, None, :] * (before - u)
