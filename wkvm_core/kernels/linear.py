"""Matrices applied to rows of activations, packed once when the model is opened.

Activations come and go as float32; what a product is computed in is a class, chosen when the weights are packed."""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """One matrix `[in, out]`, or a group `[group, in, out]` applied to `[group, rows, in]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W` in float32."""
        ...

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Stores `x @ W` in `out`."""
        ...

    def added(self, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """`base + x @ W`; base is broadcast."""
        ...


class Float32Linear:
    """Products in float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: `[..., in, out]`, any dtype and strides."""
        self._weight = weight.to(torch.float32).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self._weight)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.matmul(x, self._weight, out=out)

    def added(self, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return torch.addmm(base, x, self._weight) if x.dim() == 2 else torch.baddbmm(base, x, self._weight)


class BFloat16Linear:
    """Products of bfloat16 activations and weights, summed in float32 and rounded to bfloat16 once."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: `[..., in, out]`, any dtype and strides."""
        self._weight = weight.to(torch.bfloat16).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.to(torch.bfloat16), self._weight).to(torch.float32)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.matmul(x.to(torch.bfloat16), self._weight))

    def added(self, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return base + torch.matmul(x.to(torch.bfloat16), self._weight)
