"""Work captured once and replayed as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Capture(Protocol):
    """Turns work into something that does it again with one call."""

    def __call__(self, work: Work) -> Work:
        """work: runs on the current stream, reads nothing on the host, and leaves no trace when it is run once more."""
        ...


def as_it_is(work: Work) -> Work:
    """The capture of a device without graphs."""
    return work


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """See `Capture`. The work runs once before, so that kernels are compiled and libraries have their workspace."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        replay: Work = graph.replay
        return replay
