"""A ring of pinned memory through which the host sends bytes to the device without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16


class Fence(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Here."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed it."""
        ...


class Passed:
    """The fence of a device whose work is done when the call returns."""

    def record(self) -> None:
        """Nothing to remember."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Ring:
    """Bytes on the host and as many on the device. What is sent is copied at once and arrives in the order of the
    current stream; its place is written again only after its copy is over, which is waited for only when everything
    sent since fills the ring."""

    def __init__(self, nbytes: int, device: torch.device, fence: Callable[[], Fence] | None = None) -> None:
        """fence: what guards a copy; the device's own unless told."""
        is_cuda = device.type == "cuda"
        self.nbytes = nbytes
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._view = self._host.numpy()
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._fence = fence if fence is not None else (torch.cuda.Event if is_cuda else Passed)
        self._sent: deque[tuple[int, int, Fence]] = deque()
        self._head = 0

    def send(self, *pieces: npt.NDArray[np.generic]) -> torch.Tensor:
        """The pieces' bytes one after another, uint8 on the device, aligned to 16 bytes: valid for work that is
        enqueued on this stream before more than the rest of the ring is sent. Raises ValueError when they do not fit
        the ring."""
        size = sum(piece.nbytes for piece in pieces)
        start, end = self._reserve(-(-size // ALIGNMENT) * ALIGNMENT)
        at = start
        for piece in pieces:
            self._view[at : at + piece.nbytes] = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            at += piece.nbytes
        target = self._device[start:at]
        target.copy_(self._host[start:at], non_blocking=True)
        fence = self._fence()
        fence.record()
        self._sent.append((start, end, fence))
        return target

    def _reserve(self, size: int) -> tuple[int, int]:
        if size > self.nbytes:
            raise ValueError(f"{size} bytes for a ring of {self.nbytes}")
        start = self._head
        if start + size > self.nbytes:  # the rest of the ring stays empty; what was sent there is the oldest
            while self._sent and self._sent[0][0] >= start:
                self._sent.popleft()[2].synchronize()
            start = 0
        while self._sent and self._sent[0][0] < start + size and self._sent[0][1] > start:
            self._sent.popleft()[2].synchronize()
        self._head = start + size
        return start, self._head
