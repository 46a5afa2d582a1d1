"""The core's settings, and what they come to on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from wkvm_core.errors import Refused
from wkvm_core.sched.limits import Limits
from wkvm_core.state.slots import RESERVED_SLOTS
from wkvm_proto.messages import MAX_FRAME_BYTES
from wkvm_proto.names import ErrorCode
from wkvm_proto.settings import setting

_MAX_PROMPT = (MAX_FRAME_BYTES - 2**20) // 4
_SOCKET_PATH_BYTES = 107
_CPU_SLOTS = 256
_CPU_ROWS = 64
_MANY_THREADS_PARAMETERS = 50_000_000


class CoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As given: TOML, `WKVM_` variables, flags. `None` is decided by `resolve`."""

    model: Annotated[
        str, setting("`demo`, `counting`, `random:1.5b`, a folder, a .pth or .safetensors file", group="model")
    ] = "demo"
    model_name: Annotated[str, setting("name under which the model is served", group="model")] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16"], setting("compute dtype of the weights", group="model", metavar="DTYPE")
    ] = "float32"
    deterministic: Annotated[
        bool, setting("cold = cached = resumed = forked, token for token, at the price of speed", group="model")
    ] = False
    threads: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1024)] | None, setting("CPU threads for the model", group="model")
    ] = None
    slots: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**24)] | None, setting("states on the device", group="memory")
    ] = None
    host_memory_mb: Annotated[
        int, msgspec.Meta(ge=0, le=2**30), setting("host memory for parked and named states, MiB", group="memory")
    ] = 1024
    max_rows: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=4096)] | None, setting("requests in one step", group="scheduling")
    ] = None
    step_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=2**20), setting("most tokens in one step", group="scheduling")
    ] = 512
    chunk_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=2**20), setting("most prompt tokens of one request in one step", group="scheduling")
    ] = 256
    slice_tokens: Annotated[
        int,
        msgspec.Meta(ge=0, le=2**30),
        setting("a request that got so many tokens may be parked while others wait; 0 = never", group="scheduling"),
    ] = 256
    max_queued_requests: Annotated[
        int, msgspec.Meta(ge=1, le=2**24), setting("requests that may wait", group="limits")
    ] = 4096
    max_queued_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=2**40), setting("estimated tokens that may wait", group="limits")
    ] = 16_777_216
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PROMPT), setting("longest prompt", group="limits")] = (
        1_048_576
    )
    max_output_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=2**31 - 1), setting("most output tokens of a sample", group="limits")
    ] = 1_048_576
    store: Annotated[str, setting("folder of the states; one core owns it", group="process", metavar="DIR")] = ""
    socket: Annotated[
        str, setting("where frontends connect: a path, or an ipc:// address", group="process", metavar="PATH")
    ] = ""
    lease_s: Annotated[
        float,
        msgspec.Meta(ge=0.2, le=3600.0),
        setting("a frontend silent for so long is taken for dead", group="process"),
    ] = 2.5
    drain_s: Annotated[
        float, msgspec.Meta(ge=0.0, le=86_400.0), setting("time to finish requests after SIGTERM", group="process")
    ] = 30.0
    overlap: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=2)] | None,
        setting("steps launched before the last one's result is read", group="scheduling"),
    ] = None


class Places(msgspec.Struct, frozen=True):
    """Where this core's files are."""

    store: Path
    socket: Path

    @property
    def address(self) -> str:
        """For ZeroMQ."""
        return f"ipc://{self.socket}"


def places(config: CoreConfig, environment: dict[str, str] | os._Environ[str] = os.environ) -> Places:
    """Resolves the paths. Refuses a socket path that the kernel would cut."""
    data = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    store = Path(config.store or Path(data) / "wkvm").absolute()
    runtime = environment.get("XDG_RUNTIME_DIR") or str(Path(tempfile.gettempdir()) / f"wkvm-{os.getuid()}")
    socket = Path(config.socket.removeprefix("ipc://") or Path(runtime) / "wkvm" / "core.sock").absolute()
    if len(os.fsencode(socket)) > _SOCKET_PATH_BYTES:
        raise Refused(
            ErrorCode.BAD_CONFIG,
            f"the socket path is longer than {_SOCKET_PATH_BYTES} bytes; choose a shorter one with --socket",
            param="socket",
        )
    return Places(store, socket)


class Capacity(msgspec.Struct, frozen=True):
    """Counts, final after start."""

    num_slots: int
    num_blocks: int
    limits: Limits
    overlap: int
    threads: int


def resolve_threads(config: CoreConfig, num_parameters: int, num_cpus: int) -> int:
    """CPU threads of the model. A small one's products are too short to be worth waking a second thread for."""
    if config.threads is not None:
        return config.threads
    return num_cpus if num_parameters >= _MANY_THREADS_PARAMETERS else 1


def resolve(config: CoreConfig, slot_bytes: int, free_bytes: int, num_parameters: int, num_cpus: int) -> Capacity:
    """What the settings come to for a model on the CPU. Refuses what does not fit into the free memory."""
    room = free_bytes // slot_bytes - RESERVED_SLOTS
    num_slots = config.slots if config.slots is not None else min(_CPU_SLOTS, room // 2)
    if not 1 <= num_slots <= room:
        raise Refused(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{max(num_slots, 1)} slots of {slot_bytes} bytes do not fit: there is room for {max(room, 0)}",
            param="slots",
        )
    left = free_bytes - (num_slots + RESERVED_SLOTS) * slot_bytes
    num_blocks = min(config.host_memory_mb * 2**20, left) // slot_bytes
    max_rows = config.max_rows if config.max_rows is not None else _CPU_ROWS
    if config.step_tokens < max_rows:
        raise Refused(
            ErrorCode.BAD_CONFIG,
            f"step_tokens {config.step_tokens} is less than max_rows {max_rows}: every request needs its token a step",
            param="step_tokens",
        )
    limits = Limits(
        max_rows=max_rows,
        step_tokens=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        slice_tokens=config.slice_tokens,
    )
    return Capacity(
        num_slots=num_slots,
        num_blocks=num_blocks,
        limits=limits,
        overlap=config.overlap if config.overlap is not None else 0,
        threads=resolve_threads(config, num_parameters, num_cpus),
    )
