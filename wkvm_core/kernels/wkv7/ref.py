"""WKV-7 token by token, as the formula is written: the reference of every faster implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Wkv7:
    """The recurrence over the ragged rows of one launch, in the dtype of what it is given."""

    def __init__(self, planes: torch.Tensor, offsets: Sequence[int], read: torch.Tensor, write: torch.Tensor) -> None:
        self._planes = planes
        self._rows = list(zip(offsets[:-1], offsets[1:], read.tolist(), write.tolist(), strict=True))

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(self._planes[0])
        for start, end, read, write in self._rows:
            matrix = state[read].clone()
            for token in range(start, end):
                r, k, v, w, a, b = self._planes[:6, token]
                removed = torch.einsum("hvk,hk->hv", matrix, a)
                matrix = matrix * w[:, None, :] + removed[:, :, None] * b[:, None, :] + v[:, :, None] * k[:, None, :]
                out[token] = torch.einsum("hvk,hk->hv", matrix, r)
            state[write] = matrix
        return out
