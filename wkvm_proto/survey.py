"""What a core would find on its machine: the words of `wkvm doctor` and of the core's program that it asks."""

from __future__ import annotations

import msgspec


class Card(msgspec.Struct, frozen=True):
    """A GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability."""
    total_bytes: int
    free_bytes: int


class Survey(msgspec.Struct, frozen=True):
    """One machine and one set of settings, before anything is allocated."""

    torch: str
    """Version."""
    cuda: str
    """Version that torch is built for; empty without CUDA."""
    threads: int
    """That torch would use on the CPU."""
    wanted: str
    """The device as set."""
    device: str
    """The device that is used; empty where it is refused."""
    refusal: str
    """Why; empty otherwise."""
    card: Card | None
    """The device, where it is a GPU."""
    gpu_memory_utilization: float
    state_dtype: str
    slots: int | None
    """As set."""
    store: str
    """As set."""
    slot_bytes: int | None = None
    """Of a model without files; None for others."""
    weight_bytes: int = 0
    """Of a model without files."""
