"""WKV-7 on NVIDIA cards in CUDA C++: the same operations as in `gpu`, with the state laid out over lanes by hand.

Triton cannot be told that eight lanes share a value row: its scan takes four times as
long. Few rows of one token are stepped by Triton's kernel, many by one that the copy engine feeds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from wkvm_core.kernels.nvrtc import INT, LONG, POINTER, Module
from wkvm_core.kernels.wkv7 import gpu

SOURCE: Final = Path(__file__).with_name("wkv7.cu")
_NAMES: Final = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat_t"}
_STREAM: Final = [
    *(POINTER, POINTER, LONG, POINTER, POINTER, POINTER, LONG, LONG, POINTER, LONG, LONG, POINTER, POINTER, POINTER),
    *(INT, INT, INT),
]
_SCAN: Final = [POINTER, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, POINTER, INT]
_FEW: Final = 64
"""Rows times heads up to which a head of the scan is spread over several blocks: latency counts, not throughput."""
_MANY: Final = 2048
"""Rows times heads from which `stream` is faster than Triton's step."""
_STREAM_WARPS: Final = {torch.float32: 6, torch.float16: 8, torch.bfloat16: 8}
_STREAM_BYTES: Final = {torch.float32: 6 * 2 * 16384, torch.float16: 8 * 3 * 8192, torch.bfloat16: 8 * 3 * 8192}


def stream_instances(state_dtype: torch.dtype, dtype: torch.dtype, *, dither: bool) -> dict[bool, str]:
    """Name expressions of the step of many rows, by whether the layer is the first."""
    pair = f"{_NAMES[state_dtype]}, {_NAMES[dtype]}"
    return {first: f"stream<{pair}, {_word(first)}, {_rounding(state_dtype, dither)}>" for first in (True, False)}


def scan_instances(state_dtype: torch.dtype, plane_dtype: torch.dtype, *, dither: bool) -> dict[int, str]:
    """Name expressions of the scan, by value rows of a thread."""
    pair = f"{_NAMES[state_dtype]}, {_NAMES[plane_dtype]}"
    return {rows: f"scan<{pair}, {rows}, {_rounding(state_dtype, dither)}>" for rows in (1, 2, 4)}


def _rounding(state_dtype: torch.dtype, dither: bool) -> str:
    return _word(dither and state_dtype != torch.float32)


def _word(value: bool) -> str:
    return "true" if value else "false"


class Wkv7:
    """The operations of `gpu` for one set of dtypes on one device, each by the fastest kernel for its shape."""

    def __init__(
        self,
        state_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        *,
        plane_dtype: torch.dtype | None = None,
        dither: bool = True,
    ) -> None:
        """dtype: of activations; plane_dtype: of the scan's planes, the same unless told; dither: stochastic rounding
        of a 16-bit state."""
        streams = stream_instances(state_dtype, dtype, dither=dither)
        scans = scan_instances(state_dtype, plane_dtype or dtype, dither=dither)
        module = Module(SOURCE, [*streams.values(), *scans.values()], device)
        shared = _STREAM_BYTES[state_dtype]
        self._streams = {first: module.kernel(name, _STREAM, shared_bytes=shared) for first, name in streams.items()}
        # Blocks of a scan that start while another launch still runs crowd on the processors that it left first.
        self._scans = {rows: module.kernel(name, _SCAN, early=False) for rows, name in scans.items()}
        self._few = gpu.Wkv7(state_dtype, dither=dither)
        self._warps = _STREAM_WARPS[state_dtype]
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

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
        """See `gpu.Wkv7.step`."""
        tokens, hidden = out.shape
        heads = state.shape[1]
        if tokens * heads < _MANY:
            self._few.step(state, read, write, rkv, low, v_first, vectors, out, first=first)
            return
        # Warps are dealt in whole rows of heads, as many as run at once.
        stride = self._blocks * self._warps // heads * heads
        self._streams[first](
            (-(-stride // self._warps), 1),
            self._warps * 32,
            state,
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
            hidden,
            tokens,
            stride,
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
        *,
        rows: int | None = None,
    ) -> None:
        """See `gpu.Wkv7.scan`. rows: value rows of a thread, 1, 2 or 4; chosen by the number of heads unless told.
        The bits do not depend on it."""
        heads, count = state.shape[1], read.shape[0]
        if rows is None:
            rows = 1 if heads * count <= _FEW else 2 if heads * count <= 4 * _FEW else 4
        self._scans[rows](
            (heads * 4 // rows, count),
            128,
            state,
            state.stride(0),
            read,
            write,
            bounds,
            planes,
            decay,
            decay.shape[0],
            y,
            heads * 64,
        )
