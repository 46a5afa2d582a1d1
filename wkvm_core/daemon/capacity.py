"""Counts that the settings come to on this machine, final after start."""

from __future__ import annotations

import msgspec

from wkvm_core.daemon.config import CoreConfig
from wkvm_core.errors import Refused
from wkvm_core.sched.limits import Limits
from wkvm_core.state.slots import RESERVED_SLOTS
from wkvm_proto.names import ErrorCode

_CPU_SLOTS = 256
_CPU_ROWS = 64
_CPU_STEP_TOKENS = 512
_CPU_CHUNK_TOKENS = 256
_GPU_ROWS = 1024
_GPU_STEP_TOKENS = 8192
_GPU_MIXED_TOKENS = 256
_GPU_OVERLAP = 1
_LANES_SHARE = 0.02
"""Of a GPU's memory that lanes and sampler may take when `max_rows` is chosen for the user."""
_MANY_THREADS_PARAMETERS = 50_000_000


class Capacity(msgspec.Struct, frozen=True):
    """What was resolved."""

    num_slots: int
    num_blocks: int
    limits: Limits
    overlap: int
    threads: int
    buckets: tuple[int, ...] = ()
    """Batch sizes that are captured, ascending; none on a CPU."""


def resolve_threads(config: CoreConfig, num_parameters: int, num_cpus: int) -> int:
    """CPU threads of the model. A small one's products are too short to be worth waking a second thread for."""
    if config.threads is not None:
        return config.threads
    return num_cpus if num_parameters >= _MANY_THREADS_PARAMETERS else 1


def resolve_limits(config: CoreConfig, *, gpu_bytes: int | None = None, lane_bytes: int = 0) -> Limits:
    """Bounds of the scheduler. gpu_bytes: memory of the GPU, None on a CPU; lane_bytes: what one more row costs there
    besides its state."""
    on_gpu = gpu_bytes is not None
    max_rows = config.max_rows or (_most_rows(gpu_bytes, lane_bytes) if gpu_bytes is not None else _CPU_ROWS)
    step_tokens = config.step_tokens or max(_GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS, max_rows)
    if step_tokens < max_rows:
        raise Refused(
            ErrorCode.BAD_CONFIG,
            f"step_tokens {step_tokens} is less than max_rows {max_rows}: every request needs its token a step",
            param="step_tokens",
        )
    return Limits(
        max_rows=max_rows,
        step_tokens=step_tokens,
        chunk_tokens=config.chunk_tokens or (step_tokens if on_gpu else _CPU_CHUNK_TOKENS),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        slice_tokens=config.slice_tokens,
        mixed_tokens=config.mixed_tokens or (_GPU_MIXED_TOKENS if on_gpu else step_tokens),
    )


def resolve_overlap(config: CoreConfig, *, on_gpu: bool) -> int:
    """Steps launched before the last one's result is read."""
    if config.overlap is not None:
        return config.overlap
    return _GPU_OVERLAP if on_gpu else 0


def resolve_slots(config: CoreConfig, slot_bytes: int, free_bytes: int, *, most: int | None = None) -> int:
    """Slots handed out of so much memory, the reserved ones not counted; as many as fit, or half of that up to `most`,
    unless told. Refuses what does not fit."""
    room = free_bytes // slot_bytes - RESERVED_SLOTS
    fitting = room if most is None else min(most, max(room // 2, 1))
    num_slots = config.slots if config.slots is not None else fitting
    if not 1 <= num_slots <= room:
        raise Refused(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{max(num_slots, 1)} slots of {slot_bytes} bytes do not fit: there is room for {max(room, 0)}",
            param="slots",
        )
    return num_slots


def resolve(config: CoreConfig, slot_bytes: int, free_bytes: int, num_parameters: int, num_cpus: int) -> Capacity:
    """What the settings come to for a model on the CPU. Refuses what does not fit into the free memory."""
    num_slots = resolve_slots(config, slot_bytes, free_bytes, most=_CPU_SLOTS)
    left = free_bytes - (num_slots + RESERVED_SLOTS) * slot_bytes
    return Capacity(
        num_slots=num_slots,
        num_blocks=resolve_blocks(config, slot_bytes, left),
        limits=resolve_limits(config),
        overlap=resolve_overlap(config, on_gpu=False),
        threads=resolve_threads(config, num_parameters, num_cpus),
    )


def resolve_blocks(config: CoreConfig, slot_bytes: int, free_bytes: int) -> int:
    """Blocks of the host arena."""
    return min(config.host_memory_mb * 2**20, free_bytes) // slot_bytes


def resolve_buckets(config: CoreConfig, max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending, the largest of them `max_rows`. Chosen: powers of two and what lies halfway
    between them, so that from eight rows on less than a third of a batch is padding."""
    given = config.buckets
    if any(rows > max_rows for rows in given):
        raise Refused(ErrorCode.BAD_CONFIG, f"bucket {max(given)} is more than max_rows {max_rows}", param="buckets")
    chosen = {1, 2, 4}
    size = 8
    while size < max_rows:
        chosen |= {size, size * 3 // 2}
        size *= 2
    return tuple(sorted({rows for rows in given or chosen if rows <= max_rows} | {max_rows}))


def _most_rows(gpu_bytes: int, lane_bytes: int) -> int:
    rows = _GPU_ROWS
    while rows > 64 and rows * lane_bytes > gpu_bytes * _LANES_SHARE:
        rows //= 2
    return rows
