"""The device that a core runs on, and what is built there: chosen once, at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

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


def find_hardware(config: CoreConfig) -> Hardware:
    """The device that the settings name; `auto` is the first CUDA device, if there is one."""
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise Refused(ErrorCode.BAD_CONFIG, f"{wanted!r} names no device", param="device") from None
    if device.type == "cpu":
        return Cpu()
    if device.type != "cuda":
        raise Refused(ErrorCode.BAD_CONFIG, f"devices are auto, cpu, cuda and cuda:N, not {wanted!r}", param="device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise Refused(ErrorCode.BAD_CONFIG, f"there is no {wanted!r}: {count} CUDA devices are found", param="device")
    try:
        from wkvm_core.daemon.cuda import Cuda
    except ImportError as error:
        message = f"serving from a GPU takes {error.name}; install wkvm with its `gpu` extra, or choose --device cpu"
        raise Refused(ErrorCode.BAD_CONFIG, message, param="device") from None
    return Cuda(torch.device("cuda", device.index or 0))


class Cpu:
    """Op by op."""

    device = torch.device("cpu")
    default_dtype: Dtype = "float32"

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
