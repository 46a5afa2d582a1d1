"""Composition: from settings to a running step loop."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from wkvm_core import __version__
from wkvm_core.daemon.capacity import Capacity
from wkvm_core.daemon.config import CoreConfig, Places
from wkvm_core.daemon.desk import Desk
from wkvm_core.daemon.door import Door
from wkvm_core.daemon.hardware import find_hardware, refused_when_full
from wkvm_core.daemon.inbox import Drain, Inbox
from wkvm_core.daemon.loop import Loop
from wkvm_core.daemon.mail import Mail
from wkvm_core.daemon.memory import resident_bytes
from wkvm_core.daemon.meters import Meters
from wkvm_core.daemon.notify import Notifier
from wkvm_core.daemon.registry import Registry
from wkvm_core.daemon.workshop import Workshop
from wkvm_core.errors import Refused
from wkvm_core.exec.runner import Runner
from wkvm_core.models.open import DEMO_MODEL, has_files, open_model
from wkvm_core.models.protocol import Model
from wkvm_core.sched.scheduler import Scheduler
from wkvm_core.state.arena import Arena, Blocks
from wkvm_core.store.catalog import Catalog
from wkvm_proto.messages import ModelCard
from wkvm_proto.names import ErrorCode

Say = Callable[[str], None]

_SWITCH_INTERVAL_S = 0.0002
"""Mail and step loop share one interpreter lock: neither waits long for the other."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything of a core but the process around it."""

    card: ModelCard
    capacity: Capacity
    scheduler: Scheduler
    runner: Runner
    door: Door
    inbox: Inbox
    mail: Mail
    loop: Loop
    lines: list[str]
    """What else was resolved, for people."""


def serve(config: CoreConfig, where: Places, say: Say) -> None:
    """Loads the model, binds the socket and runs until drained. Refuses what cannot be served; raises DeviceLost."""
    notifier = Notifier.from_environment()

    def progress(text: str) -> None:
        say(text)
        notifier.status(text)

    with open_engine(config, where, progress, notifier) as engine:
        for line in describe(engine.card, engine.capacity, where) + engine.lines:
            say(line)
        _drain_on_signals(engine.inbox)
        say(f"ready at {where.address}")
        notifier.ready(f"serving {engine.card.name} from {engine.card.num_slots} slots")
        engine.loop.run_forever()


@contextmanager
def open_engine(config: CoreConfig, where: Places, progress: Say, notifier: Notifier) -> Iterator[Engine]:
    """Loads the model, allocates everything, warms up, and binds the socket last: whoever can connect is served."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if config.deterministic:
        # Read at MKL's first product: its sums then do not depend on the number of threads.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    hardware = find_hardware(config)
    with refused_when_full():
        model = open_model(
            _model_path(config.model),
            compute_dtype=config.dtype or hardware.default_dtype,
            state_dtype=config.state_dtype,
            deterministic=config.deterministic,
            device=hardware.device,
            progress=progress,
        )
    machinery = hardware.build(config, model, progress)
    capacity = machinery.capacity
    card = _card(config, model, capacity)
    arena, blocks = Arena(capacity.num_slots), Blocks(capacity.num_blocks)
    scheduler = Scheduler(arena, blocks, capacity.limits, model.fingerprint)
    runner = Runner(machinery.bank, machinery.lanes, machinery.stepper, machinery.host.view)

    inbox, meters, catalog = Inbox(), Meters(), Catalog(blocks)
    mail = Mail(where.address)
    desk = Desk(card, f"wkvm-core {__version__}", secrets.randbits(62), config.lease_s, inbox, mail.send)
    workshop = Workshop(inbox)
    registry = Registry(catalog, blocks, machinery.host.view, model.fingerprint, model.layout, workshop, mail.post)
    door = Door(scheduler, registry, blocks, meters, mail.post)

    def gauges() -> dict[str, float]:
        return {
            "wkvm_core_resident_bytes": float(resident_bytes()),
            "wkvm_frontends_connected": float(len(desk.frontends)),
            "wkvm_ipc_bad_frames": float(desk.bad_frames),
            "wkvm_states_named": float(len(catalog)),
        } | machinery.gauges()

    loop = Loop(
        inbox,
        door,
        registry,
        scheduler,
        runner,
        mail,
        meters,
        notifier,
        overlap=capacity.overlap,
        drain_s=config.drain_s,
        gauges=gauges,
    )
    where.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mail.open(desk)
    try:
        yield Engine(card, capacity, scheduler, runner, door, inbox, mail, loop, machinery.lines)
    finally:
        workshop.close()
        mail.close()
        where.socket.unlink(missing_ok=True)


def describe(card: ModelCard, capacity: Capacity, where: Places) -> list[str]:
    """What was resolved, for people."""
    mib = 2**20
    limits = capacity.limits
    size = f"{card.num_parameters / 1e6:.1f} M parameters, vocabulary {card.vocab_size}"
    mode = "deterministic" if card.deterministic else "default"
    return [
        f"model    {card.name} ({card.family}, {size})",
        f"numerics {card.compute_dtype}, states {card.state_dtype}, {mode} mode, {capacity.threads} threads",
        f"slots    {card.num_slots} of {card.slot_bytes} bytes ({card.num_slots * card.slot_bytes / mib:.0f} MiB), "
        f"{capacity.num_blocks} host blocks ({capacity.num_blocks * card.slot_bytes / mib:.0f} MiB)",
        f"steps    {limits.max_rows} rows, {limits.step_tokens} tokens, {limits.chunk_tokens} a row",
        f"store    {where.store}",
    ]


def _model_path(given: str) -> str | Path:
    if given == "demo":
        return DEMO_MODEL
    if not has_files(given):
        return given
    path = Path(given).expanduser()
    if not path.exists():
        raise Refused(ErrorCode.BAD_CONFIG, f"there is no model at {given!r}", param="model")
    return path.absolute()


def _card(config: CoreConfig, model: Model, capacity: Capacity) -> ModelCard:
    path = _model_path(config.model)
    directory = "" if isinstance(path, str) else str(path if path.is_dir() else path.parent)
    return ModelCard(
        name=config.model_name or model.name,
        directory=directory,
        family=model.family,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        max_prompt_tokens=config.max_prompt_tokens,
        max_output_tokens=config.max_output_tokens,
        num_slots=capacity.num_slots,
        slot_bytes=model.layout.slot_bytes,
        compute_dtype=model.compute_dtype,
        state_dtype=model.layout.families[0].dtype,
        deterministic=model.deterministic,
        fingerprint=str(model.fingerprint),
        num_parameters=model.num_parameters,
        created=int(time.time()),
    )


def _drain_on_signals(inbox: Inbox) -> None:
    """The first SIGTERM or SIGINT drains, the second ends at once."""
    received: list[int] = []

    def drain(number: int, frame: FrameType | Any) -> None:
        received.append(number)
        inbox.put(Drain(now=len(received) > 1))

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
