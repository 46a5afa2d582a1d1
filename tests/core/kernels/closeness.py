"""How near the kernels come to their references: the one place where bounds stand."""

from __future__ import annotations

from typing import Final

import torch

BOUNDS: Final = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative error in the Euclidean norm against float64 on the same inputs, by the coarsest dtype that anything is
rounded to on the way. Two roundings to nearest, or one at random, leave at most so much in 16 bits; float32 is left
room for sums of some thousand terms and for the device's own exp."""
TENSOR_CORE_BOUND: Final = 5e-5
"""Of sums in float32 of products of 16-bit numbers: tensor cores cut off what they do not keep, always towards zero."""
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def bound(*dtypes: torch.dtype) -> float:
    """Of what is rounded to each of these dtypes somewhere."""
    return max(BOUNDS[dtype] for dtype in dtypes)


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; the tensors may be of any dtypes and devices."""
    wanted = expected.double().cpu()
    return float((result.double().cpu() - wanted).norm() / wanted.norm())
