"""What goes to the device for one launch and what comes back, in memory of the host."""

from __future__ import annotations

import torch


class Envelope:
    """Pinned where the device is a GPU, so that copies either way wait for nobody."""

    def __init__(self, num_words: int, max_rows: int, device: torch.device) -> None:
        """num_words: int64 that are sent at most; max_rows: rows that come back at most."""
        pinned = device.type == "cuda"
        with torch.inference_mode(mode=False):
            self._there = torch.zeros(num_words, dtype=torch.int64, pin_memory=pinned)
            self._back = torch.zeros(2 * max_rows, dtype=torch.int64, pin_memory=pinned)
        self.words = self._there.numpy()
        """int64 [num_words]: to be filled before `send`."""
        self._read = self._back.numpy()

    def send(self, count: int, target: torch.Tensor) -> None:
        """The first `count` words, when the stream gets there."""
        target[:count].copy_(self._there[:count], non_blocking=True)

    def receive(self, out: torch.Tensor) -> None:
        """Tokens and flags, int64 `[2, rows]`, contiguous, when the stream gets there."""
        self._back[: out.numel()].copy_(out.view(-1), non_blocking=True)

    def outcome(self, rows: int, of: int) -> tuple[list[int], list[int]]:
        """Tokens and flags of the first rows of a launch of so many, once they are there."""
        tokens: list[int] = self._read[:rows].tolist()
        flags: list[int] = self._read[of : of + rows].tolist()
        return tokens, flags


class Envelopes:
    """Envelopes of one size, used again and again; as many as steps are ever in flight."""

    def __init__(self, num_words: int, max_rows: int, device: torch.device) -> None:
        self._size = num_words, max_rows, device
        self._free: list[Envelope] = []

    def take(self) -> Envelope:
        """One that nobody uses."""
        return self._free.pop() if self._free else Envelope(*self._size)

    def give(self, envelope: Envelope) -> None:
        """Nothing on the device refers to it any more."""
        self._free.append(envelope)
