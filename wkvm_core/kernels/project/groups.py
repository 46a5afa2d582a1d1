"""Which part of a packed matrix takes which plane of activations, and what becomes of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GRANULE = 64
"""Rows of every group of a packed matrix are a multiple of it, so that no tile holds two groups."""


class Act(IntEnum):
    """Activation of outputs."""

    NONE = 0
    TANH = 1
    SIGMOID = 2
    RELU2 = 3


@dataclass(frozen=True, slots=True)
class Group:
    """`rows` rows of the packed matrix, applied to plane `plane` of the activations."""

    rows: int
    plane: int = 0
    act: Act = Act.NONE
