"""The device's own float32 exp, for references that are to agree with its kernels bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _exp(x, y, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.exp(tl.load(x + at, mask=at < length, other=0.0)), mask=at < length)


def device_exp(x: torch.Tensor) -> torch.Tensor:
    """float32 exp(x) as Triton's kernels compute it, on the device of x."""
    flat = x.contiguous().to(DEVICE).view(-1)
    y = torch.empty_like(flat)
    _exp[(triton.cdiv(len(flat), 1024),)](flat, y, len(flat), BLOCK=1024)
    return y.to(x.device).view(x.shape)
