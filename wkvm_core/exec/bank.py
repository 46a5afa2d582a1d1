"""The states themselves: one allocation, slot-major, and the moves of whole slots."""

from __future__ import annotations

import mmap

import torch

from wkvm_core.state.layout import FAMILY_ALIGNMENT, StateLayout
from wkvm_core.state.slots import RESERVED_SLOTS, SINK_SLOT, ZERO_SLOT

_DTYPES = {
    "float64": torch.float64,
    "int64": torch.int64,
    "float32": torch.float32,
    "int32": torch.int32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


class StateBank:
    """`[slots, slot_bytes]` bytes; each family a strided view `[slots, layers, *shape]` of them.

    A slot is one contiguous range, so snapshot, resume and copy move the same bytes whatever the model.
    """

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        """`num_slots` are those handed out; the two reserved ones come on top. On the CPU pages are touched on first
        use only."""
        self.layout = layout
        self.num_slots = num_slots
        self.device = device
        rows, stride = num_slots + RESERVED_SLOTS, layout.slot_bytes
        if device.type == "cpu":
            self._memory = mmap.mmap(-1, rows * stride)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8).view(rows, stride)
        else:
            self.bytes = torch.zeros(rows, stride, dtype=torch.uint8, device=device)
        assert self.bytes.data_ptr() % FAMILY_ALIGNMENT == 0, "the bank is not aligned"
        self.families: dict[str, torch.Tensor] = {}
        for family, offset in zip(layout.families, layout.offsets, strict=True):
            flat = self.bytes[:, offset : offset + family.nbytes].view(_DTYPES[family.dtype])
            self.families[family.name] = flat.view(rows, family.layers, *family.shape)

    def zero(self, slot: int) -> None:
        """Clears a slot."""
        self._check_written(slot)
        self.bytes[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copies a slot onto another."""
        self._check_read(source)
        self._check_written(target)
        self.bytes[target].copy_(self.bytes[source])

    def read(self, slot: int, block: memoryview) -> None:
        """Slot -> host block of `slot_bytes`; into pinned memory it is over when the stream has passed it."""
        self._check_read(slot)
        torch.frombuffer(block, dtype=torch.uint8).copy_(self.bytes[slot], non_blocking=True)

    def write(self, block: memoryview, slot: int) -> None:
        """Host block of `slot_bytes` -> slot. The block must stay as it is until the stream has passed the copy."""
        self._check_written(slot)
        self.bytes[slot].copy_(torch.frombuffer(block, dtype=torch.uint8), non_blocking=True)

    def _check_read(self, slot: int) -> None:
        assert slot != SINK_SLOT and 0 <= slot < len(self.bytes), f"slot {slot} is not one to read"

    def _check_written(self, slot: int) -> None:
        assert slot not in (ZERO_SLOT, SINK_SLOT) and slot < len(self.bytes), f"slot {slot} is not one to write"
