"""Products of at most eight rows in CUDA C++: a block is small and asks for its weights before it waits for the
activations, so the weights of one launch come in while the launch before it ends. Triton cannot be told to."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from wkvm_core.kernels.nvrtc import INT, LONG, POINTER, Module

SOURCE: Final = Path(__file__).with_name("few.cu")
MAX_TOKENS: Final = 8
_NAMES: Final = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat_t"}
_TYPES: Final = [POINTER, LONG, LONG, POINTER, POINTER, POINTER, LONG, LONG, INT, INT, INT]
_ROUND: Final = 256
"""Numbers of the inner axis that a warp takes at a time."""


def instances(dtype: torch.dtype) -> dict[tuple[torch.dtype, int], str]:
    """Name expressions of the kernels for activations and weights of the dtype, by dtype of outputs and warps of a
    block."""
    return {
        (out, warps): f"few<{_NAMES[dtype]}, {_NAMES[out]}, {warps}>"
        for out in (dtype, torch.float32)
        for warps in (4, 5)
    }


class Few:
    """The kernels of one dtype of activations and weights, float16 or bfloat16, on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        names = instances(dtype)
        module = Module(SOURCE, list(names.values()), device)
        self._kernels = {key: module.kernel(name, _TYPES) for key, name in names.items()}

    @staticmethod
    def warps(inner: int, split: int) -> int | None:
        """Warps of a block for a matrix `[N, inner]` whose inner axis is cut in `split`; None: it does not fit."""
        share, rest = divmod(inner, split)
        return next((warps for warps in (4, 5) if not rest and share % (warps * _ROUND) == 0), None)

    def grouped(
        self, x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, *, split: int = 1
    ) -> None:
        """See `gpu.grouped`; x has at most eight tokens. The parts' sums get the activations too: where split > 1 there
        must be none."""
        columns, inner = weight.shape
        warps = self.warps(inner, split)
        assert warps is not None and x.shape[1] <= MAX_TOKENS, (x.shape, weight.shape, split)
        self._kernels[out.dtype, warps](
            (columns // 16, split),
            32 * warps,
            x,
            x.stride(0),
            x.stride(1),
            weight,
            granules,
            out,
            out.stride(0),
            out.stride(1),
            x.shape[1],
            inner,
            inner // (split * warps),
        )
