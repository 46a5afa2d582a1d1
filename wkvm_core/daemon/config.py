"""The core's settings, and what they come to on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from wkvm_core.errors import Refused
from wkvm_proto.messages import MAX_FRAME_BYTES
from wkvm_proto.names import ErrorCode
from wkvm_proto.settings import setting

_MAX_PROMPT = (MAX_FRAME_BYTES - 2**20) // 4
_SOCKET_PATH_BYTES = 107


class CoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As given: TOML, `WKVM_` variables, flags. `None` is decided by `resolve`."""

    model: Annotated[
        str, setting("`demo`, `counting`, `random:1.5b`, a folder, a .pth or .safetensors file", group="model")
    ] = "demo"
    model_name: Annotated[str, setting("name under which the model is served", group="model")] = ""
    device: Annotated[str, setting("auto, cpu, cuda or cuda:N", group="model")] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        setting("compute dtype of the weights: float32 on a CPU, bfloat16 on a GPU unless told", group="model"),
    ] = None
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], setting("what states are kept in", group="model")
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
    gpu_memory_utilization: Annotated[
        float, msgspec.Meta(gt=0.0, le=1.0), setting("part of the GPU's memory to use", group="memory")
    ] = 0.9
    host_memory_mb: Annotated[
        int, msgspec.Meta(ge=0, le=2**30), setting("host memory for parked and named states, MiB", group="memory")
    ] = 1024
    max_rows: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=4096)] | None, setting("requests in one step", group="scheduling")
    ] = None
    buckets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=4096)], ...],
        setting("batch sizes that are captured on a GPU; chosen from max_rows unless told", group="scheduling"),
    ] = ()
    step_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None,
        setting("most tokens in one step: 512 on a CPU, 8192 on a GPU unless told", group="scheduling"),
    ] = None
    chunk_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None,
        setting(
            "most prompt tokens of one request in one step: 256, or step_tokens on a GPU, unless told",
            group="scheduling",
        ),
    ] = None
    mixed_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None,
        setting(
            "most prompt tokens in a step that also decodes; step_tokens, or 256 on a GPU, unless told",
            group="scheduling",
        ),
    ] = None
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
