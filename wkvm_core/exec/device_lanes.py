"""Lanes on a GPU: seated without waiting for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from wkvm_core.exec.lanes import LaneRecord, Lanes
from wkvm_core.exec.ring import Ring
from wkvm_core.kernels.lane import NUM_KNOBS, NUM_NUMBERS
from wkvm_core.kernels.lane.gpu import NUM_HEADS, STALE_BIAS, STALE_COUNTS, STALE_MARKS, enter, seat
from wkvm_core.sched.plan import STOPPED
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT

RECORDS_OF_A_RING = 4
SMALLEST_RING = 1 << 22


class DeviceLanes(Lanes):
    """All tables exist from the start. Seating and halt sets cost a copy through pinned memory and one launch on the
    current stream, and neither wait nor allocate."""

    def __init__(self, num_lanes: int, vocab_size: int, device: torch.device, num_halt_sets: int) -> None:
        super().__init__(num_lanes, vocab_size, device, num_halt_sets)
        self._tables = {
            "numbers": self.numbers,
            "knobs": self.knobs,
            "marks": self.marks,
            "counts": self.counts,
            "bias": self.bias,
        }
        largest = 8 * (NUM_HEADS + NUM_NUMBERS + NUM_KNOBS) + 4 * 5 * vocab_size + 16
        self._ring = Ring(max(SMALLEST_RING, RECORDS_OF_A_RING * largest), device)

    @property
    def device_bytes(self) -> int:
        """What the tables take."""
        return sum(table.nbytes for table in self._tables.values()) + self._ring.nbytes

    @staticmethod
    def bytes_for(num_lanes: int, vocab_size: int, num_halt_sets: int) -> int:
        """`device_bytes` of such lanes, to within a megabyte, before they are opened."""
        rows = num_lanes + 2
        wide = (2 * 4 * rows + rows + num_halt_sets) * vocab_size
        return wide + 8 * rows * (NUM_NUMBERS + NUM_KNOBS) + max(SMALLEST_RING, RECORDS_OF_A_RING * 20 * vocab_size)

    def enter(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        lanes: torch.Tensor,
    ) -> None:
        """One launch that lifts halts where a row says GO and fills the rows' tokens, slots and lanes, int64 `[rows]`.

        rows: int64 `[rows, 5]`: READ, WRITE, LANE, TOKEN, ASKS. A row whose lane is halted or done reads the zero slot,
        writes the sink and gets token 0 and the idle lane.
        """
        enter(rows, self.numbers, tokens, read, write, lanes, zero_slot=ZERO_SLOT, sink_slot=SINK_SLOT)

    def _set_halt_marks(self, row: int, marks: npt.NDArray[np.uint8]) -> None:
        self.marks[row].copy_(self._ring.send(marks))

    def _load(self, record: LaneRecord) -> None:
        stale = STALE_MARKS * (record.lane in self._marked)
        stale |= STALE_BIAS * (record.lane in self._biased) | STALE_COUNTS * (record.lane in self._counted)
        sizes = len(record.stop_ids), len(record.bias_ids), len(record.counted_ids)
        words = np.array([record.lane, stale, *sizes], np.int64)
        items = (record.stop_ids, record.bias_ids, record.biases.view(np.int32), record.counted_ids, record.counts)
        narrow = [item.astype(np.int32, copy=False) for item in items]
        padding = np.zeros(sum(map(len, narrow)) % 2, np.int32)
        sent = self._ring.send(words, record.numbers, record.knobs, *narrow, padding)
        seat(sent.view(torch.int64), **self._tables, stop_mark=STOPPED)
