"""Rows of several tokens: ragged, padded to a captured size where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
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

ROW_SIZES = (1, 8, 64)
"""Rows of a captured launch, without the one that holds the padding."""
SMALLEST = 64
MOST_CAPTURED = 2048
"""Tokens; longer launches keep the device busy longer than the host takes to start them."""


def sizes(max_tokens: int, max_rows: int) -> tuple[tuple[int, int], ...]:
    """Tokens and rows of the readings to capture, ascending: four token counts from each power of two to the next, so
    that beyond the smallest at most a fifth is padding; the last one is `max_tokens` unless that is too many."""
    most = min(max_tokens, MOST_CAPTURED)
    counts, count, step = [], SMALLEST, SMALLEST // 4
    while count < most:
        counts.append(count)
        if count >= 8 * step:
            step *= 2
        count += step
    return tuple((count, rows) for count in (*counts, most) for rows in ROW_SIZES if rows < min(count, max_rows + 1))


class Reading:
    """Launches of up to `max_tokens` tokens and `max_rows` rows. Padding is one more row, which reads the zero slot and
    writes the sink, and rows without tokens after it."""

    def __init__(
        self,
        model: Model,
        bank: StateBank,
        lanes: DeviceLanes,
        sampler: GpuSampler,
        max_tokens: int,
        max_rows: int,
        sizes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """sizes: tokens and rows of what will be captured, ascending. Allocates all that launches need; `model.reserve`
        was called for `max_tokens` and `max_rows + 1`."""
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.sizes = tuple(sizes)
        self._model, self._bank, self._lanes, self._sampler = model, bank, lanes, sampler
        self.leftover = Leftover(sampler)
        rows, device = max_rows + 1, bank.device
        with torch.inference_mode(mode=False):
            self._sent = torch.zeros(_Places(max_tokens, rows).end, dtype=torch.int64, device=device)
            self._entered = torch.zeros(4, rows, dtype=torch.int64, device=device)
            self._out = torch.zeros(2 * rows, dtype=torch.int64, device=device)
        self._envelopes = Envelopes(self._sent.numel(), rows, device)
        self._graphs: dict[tuple[int, int], Work] = {}
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        self.eager_launches = 0
        """Launches for which nothing was captured."""

    def capture(self, capture: Capture, tell: Callable[[tuple[int, int]], None] = lambda _: None) -> None:
        """Captures every size, the largest first; `tell` hears the size before."""
        envelope = self._envelopes.take()
        for size in reversed(self.sizes):
            tell(size)
            self._send(envelope, (), *size)
            self._graphs[size] = capture(self._work(*size))
        self._envelopes.give(envelope)

    def launches(self, rows: Sequence[Row], places: Sequence[int]) -> Iterator[Launched]:
        """Starts the rows, as many at once as fit; places: where they stand in the plan."""
        some: list[Row] = []
        where: list[int] = []
        tokens = 0
        for row, place in zip(rows, places, strict=True):
            count = len(row.tokens) // 4
            if some and (tokens + count > self.max_tokens or len(some) == self.max_rows):
                yield self._launch(tuple(some), tuple(where), tokens)
                some, where, tokens = [], [], 0
            some.append(row)
            where.append(place)
            tokens += count
        if some:
            yield self._launch(tuple(some), tuple(where), tokens)

    def _launch(self, rows: tuple[Row, ...], places: tuple[int, ...], tokens: int) -> Launched:
        size = self._size(tokens, len(rows))
        envelope = self._envelopes.take()
        self._send(envelope, rows, *size)
        work = self._graphs.get(size)
        if work is None:
            self.eager_launches += 1
            work = self._work(*size)
        work()
        out = self._out[: 2 * (size[1] + 1)].view(2, size[1] + 1)
        logits = self._logits[size] if size in self._graphs else self._logits.pop(size)
        logprobs = self.leftover.serve(rows, logits, out)
        envelope.receive(out)
        return Launched(places, size[1] + 1, envelope, self._envelopes, logprobs)

    def _size(self, tokens: int, rows: int) -> tuple[int, int]:
        """The least captured size that holds them, or their own."""
        for size in self.sizes:
            if size[0] >= tokens and size[1] >= rows:
                return size
        return tokens, rows

    def _send(self, envelope: Envelope, rows: tuple[Row, ...], tokens: int, most: int) -> None:
        """Tables of the rows, padded to so many tokens and rows, in the order of `_Places`."""
        count = most + 1
        at = _Places(tokens, count)
        words = envelope.words
        table = words[: at.asks].reshape(count, NUM_ROW_COLUMNS)
        fill(rows, table, words[at.asks : at.wanted], self._lanes.idle)
        ids = np.frombuffer(b"".join(row.tokens for row in rows), "<u4")
        lengths = [len(row.tokens) // 4 for row in rows]
        bounds = np.full(count + 1, tokens, np.int32)
        bounds[0] = 0
        np.cumsum(lengths, out=bounds[1 : len(rows) + 1])
        wanted = words[at.wanted : at.tokens]
        wanted[:] = 0
        wanted[: len(rows)] = bounds[1 : len(rows) + 1] - 1
        words[at.tokens : at.tokens + len(ids)] = ids
        words[at.tokens + len(ids) : at.bounds] = 0
        narrow = words[at.bounds : at.end].view(np.int32)
        narrow[: count + 1] = bounds
        row_of = narrow[at.row_of : at.row_of + tokens]
        row_of[: len(ids)] = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        row_of[len(ids) :] = len(rows)
        envelope.send(at.end, self._sent)

    def _work(self, tokens: int, most: int) -> Work:
        count = most + 1
        at, sent = _Places(tokens, count), self._sent
        table = sent[: at.asks].view(count, NUM_ROW_COLUMNS)
        asked, wanted, ids = sent[at.asks : at.wanted], sent[at.wanted : at.tokens], sent[at.tokens : at.bounds]
        narrow = sent[at.bounds : at.end].view(torch.int32)
        first, read, write, lanes = (column[:count] for column in self._entered)
        batch = Batch(ids, (), read, write, wanted, narrow[: count + 1], narrow[at.row_of : at.row_of + tokens])
        out = self._out[: 2 * count].view(2, count)

        def work() -> None:
            self._lanes.enter(table, first, read, write, lanes)
            logits = self._model.forward(batch, self._bank.families)
            self._sampler.sample(logits, lanes, asked, out)
            self._logits[tokens, most] = logits

        return work


class _Places:
    """Where the tables of a launch begin in what is sent, in words of int64; `row_of` in int32 from `bounds` on."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.asks = NUM_ROW_COLUMNS * rows
        self.wanted = self.asks + rows
        self.tokens = self.wanted + rows
        self.bounds = self.tokens + tokens
        self.row_of = -(-(rows + 1) // 4) * 4
        self.end = self.bounds + -(-(self.row_of + tokens) // 2)
