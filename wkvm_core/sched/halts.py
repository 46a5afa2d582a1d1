"""Which halt sets the device knows, under which index."""

from __future__ import annotations

from wkvm_core.sched.plan import HaltSet


class HaltSets:
    """Indices of halt sets in use, counted by reference; a set that nobody uses keeps its index until it is needed."""

    def __init__(self, capacity: int) -> None:
        self._index: dict[bytes, int] = {}
        self._users: list[int] = [0] * capacity
        self._bitmaps: list[bytes | None] = [None] * capacity

    def acquire(self, bitmap: bytes) -> tuple[int, HaltSet | None]:
        """The set's index, and what to tell the runner when it does not know the set yet."""
        index = self._index.get(bitmap)
        if index is not None:
            self._users[index] += 1
            return index, None
        index = next(i for i, users in enumerate(self._users) if not users)
        old = self._bitmaps[index]
        if old is not None:
            del self._index[old]
        self._bitmaps[index], self._index[bitmap], self._users[index] = bitmap, index, 1
        return index, HaltSet(index, bitmap)

    def release(self, bitmap: bytes) -> None:
        """One user less."""
        index = self._index[bitmap]
        assert self._users[index] > 0, f"halt set {index} released, but nobody uses it"
        self._users[index] -= 1
