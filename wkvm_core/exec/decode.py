"""Rows of one token: a whole step from tables to tokens, captured for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.device_lanes import DeviceLanes
from wkvm_core.exec.envelope import Envelope, Envelopes
from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.graphs import Capture, Work
from wkvm_core.exec.launched import Launched
from wkvm_core.exec.leftover import Leftover
from wkvm_core.exec.table import fill
from wkvm_core.kernels.lane import NUM_ROW_COLUMNS
from wkvm_core.models.protocol import Batch, Model
from wkvm_core.sched.plan import Row

_WORDS_OF_A_ROW = NUM_ROW_COLUMNS + 1


class Decode:
    """Launches of up to the largest bucket. Token ids stay on the device from step to step; padded rows read the zero
    slot and write the sink. A set of rows that comes again is not sent again."""

    def __init__(
        self, model: Model, bank: StateBank, lanes: DeviceLanes, sampler: GpuSampler, buckets: Sequence[int]
    ) -> None:
        """buckets: ascending, the last no more than the rows of the sampler and of `model.reserve`. Allocates all that
        launches need."""
        self.buckets = tuple(buckets)
        self._model, self._bank, self._lanes, self._sampler = model, bank, lanes, sampler
        self.leftover = Leftover(sampler)
        most, device = self.buckets[-1], bank.device
        with torch.inference_mode(mode=False):
            self._sent = torch.zeros(_WORDS_OF_A_ROW * most, dtype=torch.int64, device=device)
            self._entered = torch.zeros(4, most, dtype=torch.int64, device=device)
            self._wanted = torch.arange(most, dtype=torch.int64, device=device)
            self._out = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._envelopes = Envelopes(self._sent.numel(), most, device)
        self._graphs: dict[int, Work] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._there: tuple[int, tuple[Row, ...]] | None = None
        """Bucket and rows that the device has."""

    @property
    def max_rows(self) -> int:
        """Rows of one launch."""
        return self.buckets[-1]

    def capture(self, capture: Capture, tell: Callable[[int], None] = lambda _: None) -> None:
        """Captures every bucket, the largest first; `tell` hears the bucket before."""
        envelope = self._envelopes.take()
        for bucket in reversed(self.buckets):
            tell(bucket)
            self._send(envelope, (), bucket)
            self._graphs[bucket] = capture(self._work(bucket))
        self._envelopes.give(envelope)

    def launch(self, rows: tuple[Row, ...], places: tuple[int, ...]) -> Launched:
        """Starts rows of one token each; places: where they stand in the plan."""
        bucket = next(size for size in self.buckets if size >= len(rows))
        envelope = self._envelopes.take()
        if self._there != (bucket, rows):
            self._there = None
            self._send(envelope, rows, bucket)
            self._there = bucket, rows
        self._graphs[bucket]()
        out = self._out[: 2 * bucket].view(2, bucket)
        logprobs = self.leftover.serve(rows, self._logits[bucket], out)
        envelope.receive(out)
        return Launched(places, bucket, envelope, self._envelopes, logprobs)

    def _send(self, envelope: Envelope, rows: tuple[Row, ...], bucket: int) -> None:
        words = envelope.words[: _WORDS_OF_A_ROW * bucket]
        table, asked = words[: NUM_ROW_COLUMNS * bucket], words[NUM_ROW_COLUMNS * bucket :]
        fill(rows, table.reshape(bucket, NUM_ROW_COLUMNS), asked, self._lanes.idle)
        envelope.send(len(words), self._sent)

    def _work(self, bucket: int) -> Work:
        table = self._sent[: NUM_ROW_COLUMNS * bucket].view(bucket, NUM_ROW_COLUMNS)
        asked = self._sent[NUM_ROW_COLUMNS * bucket : _WORDS_OF_A_ROW * bucket]
        tokens, read, write, lanes = (column[:bucket] for column in self._entered)
        batch = Batch(tokens, tuple(range(bucket + 1)), read, write, self._wanted[:bucket])
        out = self._out[: 2 * bucket].view(2, bucket)

        def work() -> None:
            self._lanes.enter(table, tokens, read, write, lanes)
            logits = self._model.forward(batch, self._bank.families)
            self._sampler.sample(logits, lanes, asked, out)
            self._logits[bucket] = logits

        return work
