"""The device that a core runs on, and what is built there: chosen once, at start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, Protocol

import torch

from wkvm_core.daemon.capacity import Capacity, resolve
from wkvm_core.daemon.config import CoreConfig
from wkvm_core.daemon.memory import available_bytes
from wkvm_core.errors import Refused
from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.eager import EagerStepper
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import Sampler
from wkvm_core.exec.stepper import Stepper
from wkvm_core.models.protocol import Batch, Model
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT
from wkvm_core.store.host import HostArena
from wkvm_proto.names import ErrorCode

Say = Callable[[str], None]
Dtype = Literal["float32", "bfloat16", "float16"]
DEFAULT_DTYPES: Final[Mapping[str, Dtype]] = MappingProxyType({"cpu": "float32", "cuda": "bfloat16"})
"""Compute dtype unless told, by the kind of device."""
OLDEST = (8, 0)
"""Compute capability that the kernels need."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """What executes plans."""

    capacity: Capacity
    bank: StateBank
    lanes: Lanes
    host: HostArena
    stepper: Stepper
    lines: list[str] = field(default_factory=list)
    """What else was resolved, for people."""
    gauges: Callable[[], dict[str, float]] = dict


class Hardware(Protocol):
    """A kind of device."""

    device: torch.device
    default_dtype: Dtype
    """Compute dtype unless told."""

    def build(self, config: CoreConfig, model: Model, progress: Say) -> Machinery:
        """Allocates everything for the model and warms it up. Raises Refused when it does not fit."""
        ...


def find_device(wanted: str) -> torch.device:
    """The device that a setting names; `auto` is the first CUDA device, if there is one. Raises Refused(BAD_CONFIG) for
    one that is not there or too old."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    named = re.fullmatch("cuda(?::([0-9]+))?", wanted)  # torch.device takes 256 for 0
    if named is None:
        raise Refused(ErrorCode.BAD_CONFIG, f"devices are auto, cpu, cuda and cuda:N, not {wanted!r}", param="device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(named[1] or 0)
    if index >= count:
        raise Refused(ErrorCode.BAD_CONFIG, f"there is no {wanted!r}: {count} CUDA devices are found", param="device")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        has, needed = (".".join(map(str, version)) for version in (capability, OLDEST))
        message = f"{torch.cuda.get_device_name(index)} has compute capability {has}; the kernels need {needed}"
        raise Refused(ErrorCode.BAD_CONFIG, f"{message}; choose another device, or --device cpu", param="device")
    return torch.device("cuda", index)


def find_hardware(config: CoreConfig) -> Hardware:
    """What runs on the device that the settings name. Raises Refused(BAD_CONFIG) as `find_device` does, and for a GPU
    without the packages that it takes."""
    device = find_device(config.device)
    if device.type == "cpu":
        return Cpu()
    try:
        from wkvm_core.daemon.cuda import Cuda
    except ImportError as error:
        message = f"serving from a GPU takes {error.name}; install wkvm with its `gpu` extra, or choose --device cpu"
        raise Refused(ErrorCode.BAD_CONFIG, message, param="device") from None
    return Cuda(device)


@contextmanager
def refused_when_full() -> Iterator[None]:
    """Too little memory on a GPU is a matter of settings: Refused(NOT_ENOUGH_MEMORY)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"the GPU's memory is too small: {str(error).partition('. ')[0]}"
        raise Refused(ErrorCode.NOT_ENOUGH_MEMORY, message, param="gpu_memory_utilization") from None


class Cpu:
    """Op by op."""

    device = torch.device("cpu")
    default_dtype = DEFAULT_DTYPES["cpu"]

    def build(self, config: CoreConfig, model: Model, progress: Say) -> Machinery:
        """See `Hardware`."""
        num_cpus = len(os.sched_getaffinity(0))
        capacity = resolve(config, model.layout.slot_bytes, available_bytes(), model.num_parameters, num_cpus)
        torch.set_num_threads(capacity.threads)
        bank = StateBank(model.layout, capacity.num_slots, self.device)
        lanes = Lanes.open(capacity.limits.max_rows, model.vocab_size, self.device)
        sampler = Sampler(lanes)
        progress("warming up")
        warm_up(model, bank, sampler, lanes)
        return Machinery(
            capacity=capacity,
            bank=bank,
            lanes=lanes,
            host=HostArena(capacity.num_blocks, model.layout.slot_bytes),
            stepper=EagerStepper(model, bank, lanes, sampler),
        )


def warm_up(model: Model, bank: StateBank, sampler: Sampler, lanes: Lanes) -> None:
    """One small batch through model and sampler, from the zero state into the sink, so that the first request does not
    pay for what is done once."""
    with torch.inference_mode():
        for tokens in (1, 4):
            batch = Batch(
                tokens=torch.zeros(tokens, dtype=torch.int64),
                offsets=(0, tokens),
                read=torch.tensor([ZERO_SLOT]),
                write=torch.tensor([SINK_SLOT]),
                wanted=torch.tensor([tokens - 1]),
            )
            logits = model.forward(batch, bank.families)
            sampler.sample(logits, torch.tensor([lanes.idle]), torch.zeros(1, dtype=torch.bool))
