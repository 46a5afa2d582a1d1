"""The sampler of a GPU: one launch for all rows, and what is left of some of them afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import Logprobs, Sampler, outcomes
from wkvm_core.kernels.draw import best
from wkvm_core.kernels.lane import LOGPROBS, TYPICAL
from wkvm_core.kernels.sample.gpu import cut_for, sample


class GpuSampler:
    """Samples like `Sampler`, with the same independence of rows. All of it is on the device but for rows with
    typical-p, whose draw is `Sampler`'s, and log-probabilities: `left_over` tells the rows, `rest` serves them."""

    def __init__(self, lanes: Lanes, max_rows: int, *, block: int = 0, num_warps: int = 0) -> None:
        """Allocates what launches of at most `max_rows` rows need. block: logits that a program takes at a time, chosen
        by the number of rows, as warps are, unless told; the results do not depend on it."""
        self.lanes = lanes
        self.max_rows = max_rows
        self._eager = Sampler(lanes)
        self._cut = (block, num_warps) if block and num_warps else None
        shape = (max_rows, lanes.vocab_size)
        self._outcomes = outcomes().to(lanes.device)
        self._shaped = torch.empty(shape, dtype=torch.float32, device=lanes.device)
        self._ranks = torch.empty(shape, dtype=torch.int32, device=lanes.device)

    @property
    def device_bytes(self) -> int:
        """What it has allocated."""
        return self._outcomes.nbytes + self._shaped.nbytes + self._ranks.nbytes

    @staticmethod
    def bytes_for(max_rows: int, vocab_size: int) -> int:
        """`device_bytes`, to within a megabyte, of a sampler that is not made yet."""
        return 8 * max_rows * vocab_size

    def sample(self, logits: torch.Tensor, lanes: torch.Tensor, asks: torch.Tensor, out: torch.Tensor) -> None:
        """One launch, which a graph may hold: it allocates nothing and the host reads nothing.

        logits: float32 `[rows, vocab]`, not changed, contiguous within a row: the first columns of a wider buffer will
        do; lanes: int64 `[rows]`, each active lane at most once; asks: int64 `[rows]`, bits of which SAMPLE and PAUSE
        count; out: int64 `[2, rows]`, gets tokens and flags as in `Sampled`. A row that does not ask to be sampled gets
        -1 and RAN; a lane with typical-p is left as it is, and its row gets LEFT_OVER and 0 until `rest` has run.
        """
        block, num_warps = self._cut or cut_for(len(logits))
        sample(
            logits,
            lanes,
            asks,
            out,
            numbers=self.lanes.numbers,
            knobs=self.lanes.knobs,
            marks=self.lanes.marks,
            counts=self.lanes.counts,
            bias=self.lanes.bias,
            outcomes=self._outcomes,
            shaped=self._shaped,
            ranks=self._ranks,
            block=block,
            num_warps=num_warps,
        )

    def left_over(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Places of lanes, known on the host, that `rest` must serve once their rows were sampled."""
        needs = self.lanes.needs(torch.tensor(lanes, dtype=torch.int64))
        return tuple((needs & (TYPICAL | LOGPROBS)).nonzero()[0].tolist())

    def rest(
        self, logits: torch.Tensor, rows: Sequence[int], lanes: Sequence[int], pause: Sequence[bool], out: torch.Tensor
    ) -> Logprobs | None:
        """Serves the given rows after `sample(logits, .., out)`: fills in those with typical-p, and returns the
        log-probabilities that some ask for. Op by op, and typical-p waits for the device.

        rows: those of `left_over` that were sampled; lanes, pause: theirs, known on the host. A lane that was halted
        or done stays so, whatever is said of it here.
        """
        needs = self.lanes.needs(torch.tensor(lanes, dtype=torch.int64))
        typical = [at for at, need in enumerate(needs) if need & TYPICAL]
        if typical:
            where = self._index([rows[at] for at in typical])
            own = self._index([lanes[at] for at in typical])
            paused = self._index([pause[at] for at in typical]).to(torch.bool)
            sampled = self._eager.draw(logits.index_select(0, where), own, paused)
            out.index_copy_(1, where, sampled)
        asking = [at for at, need in enumerate(needs) if need & LOGPROBS]
        if not asking:
            return None
        where = self._index([rows[at] for at in asking])
        raw = logits.index_select(0, where)
        tokens = out[0].index_select(0, where).clamp(min=0)
        wanted = self.lanes.num_logprobs(torch.tensor([lanes[at] for at in asking], dtype=torch.int64))
        told = self._eager.logprobs(raw, tokens, best(raw)[0], wanted)
        return replace(told, rows=tuple(rows[at] for at in asking))

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.int64)).to(self.lanes.device)
