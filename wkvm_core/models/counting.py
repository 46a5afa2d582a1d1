"""The counting model: its state is the number of tokens consumed and a hash of them, its next token depends on both.

A token fed twice, a slot mixed up or one step too many becomes a wrong integer, so every mistake in scheduling shows on
a CPU in milliseconds. All arithmetic is modulo 2**64: batch, chunk borders and forks cannot change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from blake3 import blake3

from wkvm_core.kernels.splitmix import signed, splitmix64
from wkvm_core.models.protocol import Batch
from wkvm_core.state.layout import Fingerprint, StateFamily, StateLayout

VOCAB_SIZE = 256
EOS_ID = 0
FIRST_PRINTABLE = 32
NUM_PRINTABLE = 95
MULTIPLIER = 0x5851F42D4C957F2D
"""Odd, so that it has an inverse modulo 2**64."""
_DEFINITION = b"wkvm counting model 1: hash*5851f42d4c957f2d + splitmix64(id), next token by splitmix64(hash ^ count)"
_FIRST_POWERS = 4096


class CountingModel:
    """Vocabulary: the 256 bytes, end of text 0. The most probable token is always printable ASCII; the logits fall off
    from it to its neighbours in a fixed shape without ties, the other bytes lie far below.

    State, int64 `[2]`: tokens consumed, and hash h, from 0: h = h * MULTIPLIER + splitmix64(id) for each token.
    """

    def __init__(self, *, name: str = "counting", device: torch.device | str = "cpu") -> None:
        self.name = name
        self.family = "counting"
        self.vocab_size = VOCAB_SIZE
        self.eos_ids: tuple[int, ...] = (EOS_ID,)
        self.layout = StateLayout((StateFamily(name="count", shape=(2,), dtype="int64", layers=1),))
        self.fingerprint = Fingerprint(
            model=blake3(_DEFINITION).hexdigest(), layout=self.layout.fingerprint, numerics="int64"
        )
        self.compute_dtype = "int64"
        self.deterministic = True
        self.num_parameters = 0
        self.device = torch.device(device)
        self._terms = splitmix64(torch.arange(VOCAB_SIZE)).to(self.device)  # [vocab]
        self._shapes = _logit_shapes().to(self.device)  # [printable, vocab]
        self._up, self._down = _powers(_FIRST_POWERS, self.device)

    def reserve(self, max_tokens: int, max_rows: int) -> None:
        """See `Model.reserve`."""
        if max_tokens >= self._up.shape[0]:
            self._up, self._down = _powers(max_tokens + 1, self.device)

    def twin(self) -> Self:
        """See `Model.twin`; nothing of it changes in a forward pass but its reserve, which only grows."""
        return self

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See Model. Cost: a few operations on int64 [tokens], whatever the number of rows."""
        state = families["count"].select(1, 0)  # [slots, 2]
        before = state.index_select(0, batch.read)
        if batch.single:
            after = torch.stack((before[:, 0] + 1, before[:, 1] * MULTIPLIER + self._terms[batch.tokens]), 1)
            state.index_copy_(0, batch.write, after)
            seen = after.index_select(0, batch.wanted)
        else:
            after, seen = self._prefill(batch, before)
            state.index_copy_(0, batch.write, after)
        best = next_printable(seen[:, 0], seen[:, 1])
        return self._shapes.index_select(0, best)

    def _prefill(self, batch: Batch, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States after each row's last token, int64 [rows, 2], and after each wanted one, int64 [wanted, 2].

        With m = MULTIPLIER, token i of the launch contributes term[i] * m**(p - i) to the hash at place p, which is
        m**p times a prefix sum of term[i] * m**-i: the whole ragged batch needs one sum.
        """
        num_tokens = batch.tokens.shape[0]
        self.reserve(num_tokens, 0)
        prefix = torch.zeros(num_tokens + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self._terms[batch.tokens] * self._down[:num_tokens], 0, out=prefix[1:])
        borders = torch.tensor(batch.offsets) if batch.bounds is None else batch.bounds.to(torch.int64)
        starts, ends = borders[:-1], borders[1:]

        def states(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            first = starts[rows]
            length = places + 1 - first
            old = before[rows]
            hashes = old[:, 1] * self._up[length] + (prefix[places + 1] - prefix[first]) * self._up[places]
            return torch.stack((old[:, 0] + length, hashes), 1)

        rows = torch.arange(starts.shape[0], device=self.device)
        after = states(rows, ends - 1)
        # Rows without tokens are padding: what is made of them goes to the sink.
        owners = torch.searchsorted(ends, batch.wanted, right=True).clamp_(max=rows.shape[0] - 1)
        seen = states(owners, batch.wanted)
        return after, seen


def next_printable(counts: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """The most probable next token less FIRST_PRINTABLE, int64 [states] in 0..94."""
    return (splitmix64(hashes ^ counts) >> 32 & 0xFFFFFFFF) % NUM_PRINTABLE


def _logit_shapes() -> torch.Tensor:
    """float32 [printable, vocab]: logits by the most probable token. Around the ring of printable tokens they fall by
    0.25 a place, those on the left by 0.125 more; other bytes begin at -16."""
    away = (torch.arange(NUM_PRINTABLE)[None] - torch.arange(NUM_PRINTABLE)[:, None]) % NUM_PRINTABLE
    left = away > NUM_PRINTABLE // 2
    distance = torch.where(left, NUM_PRINTABLE - away, away)
    shapes = (-16.0 - torch.arange(VOCAB_SIZE) / 64.0).repeat(NUM_PRINTABLE, 1)
    shapes[:, FIRST_PRINTABLE : FIRST_PRINTABLE + NUM_PRINTABLE] = 4.0 - 0.25 * distance - 0.125 * left
    return shapes


def _powers(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """MULTIPLIER**k and its inverse's, modulo 2**64 as int64, for k in 0..count - 1."""
    inverse = pow(MULTIPLIER, -1, 1 << 64)
    return _powers_of(MULTIPLIER, count).to(device), _powers_of(inverse, count).to(device)


def _powers_of(base: int, count: int) -> torch.Tensor:
    powers = torch.ones(count, dtype=torch.int64)
    known = 1
    while known < count:  # doubling: b**(k + known) = b**k * b**known
        more = min(known, count - known)
        powers[known : known + more] = powers[:more] * signed(pow(base, known, 1 << 64))
        known += more
    return powers
