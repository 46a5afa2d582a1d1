"""A bank as the runner keeps it, and launches over it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from wkvm_core.models.protocol import Batch, Model
from wkvm_core.state.layout import StateLayout

Families = dict[str, torch.Tensor]


def bank(layout: StateLayout, slots: int, device: torch.device | None = None) -> Families:
    """Slot-major, each family a strided view `[slots, layers, *shape]`; all zeros but for slot 1, full of noise, the
    same in every bank."""
    noise = torch.Generator(device or "cpu").manual_seed(0)
    memory = torch.zeros(slots, layout.slot_bytes, dtype=torch.uint8, device=device)
    views = {}
    for family, offset in zip(layout.families, layout.offsets, strict=True):
        flat = memory[:, offset : offset + family.nbytes].view(getattr(torch, family.dtype))
        views[family.name] = flat.unflatten(1, (family.layers, *family.shape))
        views[family.name][1].normal_(generator=noise)
    return views


def launch(
    rows: Sequence[Sequence[int]], read: Sequence[int], write: Sequence[int], wanted: Sequence[int] | None = None
) -> Batch:
    """Rows of tokens; without `wanted`, the logits of every token are asked for."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return Batch(
        tokens=torch.tensor([token for row in rows for token in row]),
        offsets=tuple(offsets),
        read=torch.tensor(read),
        write=torch.tensor(write),
        wanted=torch.arange(offsets[-1]) if wanted is None else torch.tensor(wanted),
    )


def run(model: Model, families: Families, slot: int, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits `[tokens, vocab]` of one session, fed piece after piece into `slot` from the zero state."""
    logits = []
    for number, piece in enumerate(pieces):
        logits.append(model.forward(launch([piece], [slot if number else 0], [slot]), families))
    return torch.cat(logits)


def cut(tokens: Sequence[int], borders: Sequence[int]) -> list[list[int]]:
    """The tokens cut before each border."""
    edges = [0, *sorted(set(borders) - {0, len(tokens)}), len(tokens)]
    return [list(tokens[start:end]) for start, end in pairwise(edges)]


def slot_of(families: Families, slot: int) -> torch.Tensor:
    """Everything the slot holds, in one vector."""
    return torch.cat([view[slot].reshape(-1) for view in families.values()])


def distance(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((result.double() - reference.double()).norm() / reference.double().norm())
