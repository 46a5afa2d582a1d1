"""Shapes of the RWKV-7 models that there are, by the word for their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one model; the feed-forward layer is four times as wide as the model."""

    layers: int
    hidden: int
    ranks: tuple[int, int, int, int]
    """Of the low-rank matrices w, a, v, g."""
    vocab: int = 65_536

    @property
    def num_parameters(self) -> int:
        """Elements of all canonical tensors. The first block has a norm more, and none of what mixes in its value."""
        c = self.hidden
        block = 12 * c * c + 2 * c * sum(self.ranks) + 19 * c
        return 2 * self.vocab * c + 2 * c + self.layers * block + c - 2 * c * self.ranks[2]


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "tiny": Shape(2, 128, (32, 32, 16, 48), vocab=512),
        "0.1b": Shape(12, 768, (64, 64, 32, 128)),
        "0.4b": Shape(24, 1024, (64, 64, 32, 128)),
        "1.5b": Shape(24, 2048, (96, 96, 64, 256)),
        "2.9b": Shape(32, 2560, (96, 96, 64, 320)),
        "7.2b": Shape(32, 4096, (128, 128, 96, 480)),
    }
)
"""`tiny` is for tests: every kind of tensor, and ids beyond the bytes. The others are those of the released models."""
