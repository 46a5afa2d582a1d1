from __future__ import annotations

import numpy as np
import pytest
import torch

from wkvm_core.exec.ring import Ring

CPU = torch.device("cpu")


class Log:
    """Fences that note in which order they were waited for."""

    def __init__(self) -> None:
        self.made = 0
        self.waited: list[int] = []

    def fence(self) -> Log.Fence:
        self.made += 1
        return Log.Fence(self, self.made - 1)

    class Fence:
        def __init__(self, log: Log, number: int) -> None:
            self._log, self._number = log, number
            self._is_recorded = False

        def record(self) -> None:
            self._is_recorded = True

        def synchronize(self) -> None:
            assert self._is_recorded
            self._log.waited.append(self._number)


def block(value: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, value, np.uint8)


def test_pieces_arrive_one_after_another_aligned() -> None:
    ring = Ring(256, CPU)
    ring.send(block(9, 3))
    sent = ring.send(np.array([1, -2]), np.array([0.5]), np.array([7, 8, 9], np.int32))
    assert sent.data_ptr() % 16 == ring.send(block(0, 1)).data_ptr() % 16
    assert sent[:16].view(torch.int64).tolist() == [1, -2]
    assert sent[16:24].view(torch.float64).tolist() == [0.5]
    assert sent[24:].view(torch.int32).tolist() == [7, 8, 9]


def test_a_place_is_written_again_only_after_its_copy_is_over() -> None:
    log = Log()
    ring = Ring(64, CPU, log.fence)
    for value in range(4):
        ring.send(block(value, 16))
    assert log.waited == []
    ring.send(block(4, 16))
    assert log.waited == [0]
    ring.send(block(5, 32))
    assert log.waited == [0, 1, 2]
    ring.send(block(6, 16))
    assert log.waited == [0, 1, 2, 3]


def test_what_does_not_fit_behind_the_head_starts_at_the_front() -> None:
    log = Log()
    ring = Ring(64, CPU, log.fence)
    ring.send(block(0, 32))
    ring.send(block(1, 16))
    sent = ring.send(block(2, 32))  # 16 bytes are left at the end
    assert log.waited == [0]
    assert sent.tolist() == [2] * 32
    ring.send(block(3, 16))
    assert log.waited == [0, 1]
    ring.send(block(4, 48))
    assert log.waited == [0, 1, 2, 3]


def test_what_is_in_use_stays_as_it_was_sent() -> None:
    ring = Ring(1 << 10, CPU)
    rng = np.random.default_rng(0)
    held: list[tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], torch.Tensor]] = []
    for _ in range(300):
        data = rng.integers(0, 256, rng.integers(0, 200), np.uint8)
        held.append((data, ring.send(data)))
        kept = 0
        for sent, there in reversed(held):
            kept += len(sent) + 16
            if kept > (1 << 10) - 2 * 216:  # a wrap may leave as much as one piece unused
                break
            assert there.numpy().tobytes() == sent.tobytes()


def test_more_than_the_ring_holds_is_refused() -> None:
    ring = Ring(64, CPU)
    with pytest.raises(ValueError, match="80 bytes for a ring of 64"):
        ring.send(block(0, 65))
    assert ring.send(block(1, 64)).tolist() == [1] * 64
