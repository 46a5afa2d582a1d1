"""Matrices applied to rows of activations, packed once when the model is opened.

Activations come and go as float32; how a product is computed is a class, chosen when the weights are packed."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

LOSSLESS: Final = 2.0**-25
"""Relative error (Frobenius norm) up to which a stored weight counts as unchanged: half of float32's unit roundoff."""


class Linear(Protocol):
    """One matrix `[in, out]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W`, float32 `[rows, out]`, freshly allocated; x: float32 `[rows, in]`, contiguous."""
        ...


class Float32Linear:
    """Weights, products and sums in float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: `[in, out]`, any dtype and strides."""
        self._weight = weight.to(torch.float32).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._weight)


class HalfStoredLinear:
    """Products and sums in float32 of weights stored as float16, which half the bytes that a decode step reads.

    Same arithmetic as Float32Linear for weights that float16 holds, such as those of bfloat16 checkpoints."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: `[in, out]`, any dtype and strides, `is_half(weight)`."""
        stored = weight.to(torch.float32).t().contiguous()
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(stored, None)
        self._apply: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._apply(x, self._packed)
        return product


class BFloat16Linear:
    """Products of bfloat16 activations and weights, summed in float32 and rounded to bfloat16 once."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: `[in, out]`, any dtype and strides."""
        self._weight = weight.to(torch.bfloat16).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.to(torch.bfloat16), self._weight).to(torch.float32)


def pack_float32(weight: torch.Tensor) -> Linear:
    """The fastest Linear of float32 arithmetic for the weight `[in, out]` on this machine."""
    has_kernel = weight.device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines
    return HalfStoredLinear(weight) if has_kernel and is_half(weight) else Float32Linear(weight)


def is_half(weight: torch.Tensor) -> bool:
    """float16 holds the weight as exactly as float32 arithmetic could tell."""
    if weight.dtype == torch.float16:
        return True
    full = weight.to(torch.float32)
    error = torch.linalg.vector_norm(full.to(torch.float16).to(torch.float32).sub_(full))
    return bool(error <= LOSSLESS * torch.linalg.vector_norm(full))
