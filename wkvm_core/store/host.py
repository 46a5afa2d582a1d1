"""Host memory for snapshots: one anonymous mapping in blocks of one slot. The store owns it, only `exec` copies."""

from __future__ import annotations

import mmap


class HostArena:
    """`num_blocks` blocks of `block_bytes`; pages are touched on first use only."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        assert block_bytes % mmap.PAGESIZE == 0, block_bytes
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._map = mmap.mmap(-1, max(num_blocks * block_bytes, mmap.PAGESIZE))
        self._view = memoryview(self._map)

    @property
    def whole(self) -> memoryview:
        """The bytes of all blocks."""
        return self._view[: self.num_blocks * self.block_bytes]

    def view(self, block: int) -> memoryview:
        """The bytes of a block, writable, valid until close."""
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        return self._view[block * self.block_bytes : (block + 1) * self.block_bytes]

    def close(self) -> None:
        """Gives the memory back. Views of blocks must be gone."""
        self._view.release()
        self._map.close()
