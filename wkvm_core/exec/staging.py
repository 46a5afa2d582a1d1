"""A plan's rows as tensors: what the forward pass and the sampler take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wkvm_core.exec.lanes import Lanes
from wkvm_core.models.protocol import Batch
from wkvm_core.sched.plan import Row


@dataclass(frozen=True, slots=True)
class Staged:
    """The indices of a set of rows. A steady set of decode rows is staged once and used step after step."""

    rows: tuple[Row, ...]
    offsets: tuple[int, ...]
    """[rows + 1]."""
    read: torch.Tensor
    """int64 [rows]."""
    write: torch.Tensor
    """int64 [rows]."""
    ids: torch.Tensor
    """int64 [tokens]: given ids; 0 where a lane's next token goes."""
    feed_places: torch.Tensor
    """int64 [feeding rows]: places in `ids` that lanes fill."""
    feed_lanes: torch.Tensor
    """int64 [feeding rows]."""
    wanted: torch.Tensor
    """int64 [sampling rows]: places in `ids` whose logits are sampled."""
    sampling: tuple[int, ...]
    """Indices of the sampling rows."""
    lanes: torch.Tensor
    """int64 [sampling rows]."""
    pause: torch.Tensor
    """bool [sampling rows]."""

    def batch(self, lanes: Lanes) -> Batch:
        """The batch with the lanes' tokens as they are now."""
        if len(self.feed_places) == len(self.ids):
            tokens = lanes.next_tokens(self.feed_lanes)
        elif len(self.feed_places):
            tokens = self.ids.index_copy(0, self.feed_places, lanes.next_tokens(self.feed_lanes))
        else:
            tokens = self.ids
        return Batch(tokens, self.offsets, self.read, self.write, self.wanted)


def stage(rows: Sequence[Row], device: torch.device) -> Staged:
    """Tensors of the rows, in order, on the device."""
    pieces: list[bytes] = []
    offsets, feed_places, sampling = [0], [], []
    end = 0
    for index, row in enumerate(rows):
        if row.feed:
            feed_places.append(end)
            pieces.append(b"\0\0\0\0")
            end += 1
        else:
            pieces.append(row.tokens)
            end += len(row.tokens) // 4
        assert end > offsets[-1], f"a row of request {row.request} has no tokens"
        offsets.append(end)
        if row.sample:
            sampling.append(index)
    ids = np.frombuffer(b"".join(pieces), "<u4").astype(np.int64)
    return Staged(
        rows=tuple(rows),
        offsets=tuple(offsets),
        read=_int64([row.read for row in rows], device),
        write=_int64([row.write for row in rows], device),
        ids=torch.from_numpy(ids).to(device),
        feed_places=_int64(feed_places, device),
        feed_lanes=_int64([row.lane for row in rows if row.feed], device),
        wanted=_int64([offsets[index + 1] - 1 for index in sampling], device),
        sampling=tuple(sampling),
        lanes=_int64([rows[index].lane for index in sampling], device),
        pause=torch.tensor([rows[index].pause for index in sampling], dtype=torch.bool, device=device),
    )


def _int64(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
