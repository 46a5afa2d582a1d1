"""What the runner asks of a model, and what it gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from wkvm_core.state.layout import Fingerprint, StateLayout


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one launch, ragged and concatenated: row r owns tokens `offsets[r]:offsets[r + 1]`.

    Every row has at least one token; on an accelerator there may be rows of none besides, which pad the tables and
    leave their slots alone. No slot is written by one row and read by another.
    """

    tokens: torch.Tensor
    """int64 [tokens], on the model's device."""
    offsets: tuple[int, ...]
    """[rows + 1], on the host, from 0 to the number of tokens; empty where only the device knows them (`bounds`)."""
    read: torch.Tensor
    """int64 [rows]: slot whose state a row starts from."""
    write: torch.Tensor
    """int64 [rows]: slot that receives the state after the row's last token."""
    wanted: torch.Tensor
    """int64 [wanted]: places in `tokens` whose logits are asked for."""
    bounds: torch.Tensor | None = None
    """int32 [rows + 1]: `offsets` on the model's device. Given to models on an accelerator unless `single`."""
    row_of: torch.Tensor | None = None
    """int32 [tokens]: the row of each token, on the model's device. Given as `bounds` is."""

    @property
    def single(self) -> bool:
        """Every row has exactly one token: a pure decode step."""
        rows = self.tokens.shape[0]
        return self.bounds is None and self.offsets == tuple(range(rows + 1))


class Model(Protocol):
    """Weights on one device and the forward pass over slots."""

    name: str
    family: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    layout: StateLayout
    fingerprint: Fingerprint
    compute_dtype: str
    deterministic: bool
    """The arithmetic of a token depends neither on batch size nor on chunk borders."""
    num_parameters: int

    def reserve(self, max_tokens: int, max_rows: int) -> None:
        """Allocates what the forward passes of at most so many tokens and rows need, once; `max_rows` also bounds
        `wanted`. On an accelerator a forward pass allocates nothing afterwards and never waits for the device."""
        ...

    def twin(self) -> Self:
        """The same weights with room of its own: `reserve` of one says nothing of the other, and both may be at a
        forward pass at the same time, over rows that share no slot."""
        ...

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Reads every row's state from slot `read[r]`, consumes its tokens, writes slot `write[r]`.

        `families[name]` is the bank's view `[slots, layers, *shape]` of that family (strided by the slot).
        Returns float32 logits `[wanted, vocab_size]`. A row's result depends on its own tokens and state only.
        """
        ...
