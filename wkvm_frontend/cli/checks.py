"""What `wkvm serve` needs, looked at one by one; each look is a function that gives one finding."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from wkvm_frontend.cli.runtime_folder import MAX_SOCKET_PATH, SOCKET_NAME, base_folder
from wkvm_frontend.cli.version import installed
from wkvm_frontend.text.huggingface import TOKENIZER_FILE
from wkvm_frontend.text.world import WORLD_FILE

NEEDED = ("torch", "numpy", "pyzmq", "msgspec", "safetensors", "starlette", "uvicorn", "uvloop", "httptools")
NEEDED_TOO = ("tokenizers", "jinja2", "prometheus-client", "blake3", "tqdm")
WEIGHTS = (".safetensors", ".pth")
SPARE_DISK = 2**30


class Level(StrEnum):
    """How bad it is."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "FAIL"


class Finding(msgspec.Struct, frozen=True):
    """One look: what, how it is, and what to do about it."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def python_version(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """3.11 is the oldest."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding(Level.BAD, "python", f"{text} is too old", "install wkvm into Python 3.11 or newer")
    return Finding(Level.GOOD, "python", text)


def packages(names: tuple[str, ...] = NEEDED + NEEDED_TOO) -> Finding:
    """Installed, all of them."""
    missing = [name for name in names if installed(name) is None]
    if missing:
        return Finding(
            Level.BAD,
            "packages",
            f"missing: {', '.join(missing)}",
            f"{sys.executable} -m pip install {' '.join(missing)}",
        )
    return Finding(Level.GOOD, "packages", f"{len(names)} of {len(names)} installed")


def model_folder(model: str) -> Path | None:
    """Where a model's files are; None for one without files."""
    if model == "counting" or model.startswith("random:"):
        return None
    if model == "demo":
        core = importlib.util.find_spec("wkvm_core")
        assert core is not None
        assert core.origin is not None
        return Path(core.origin).parent / "assets" / "wkvm-demo"
    return Path(model).expanduser()


def model_files(model: str) -> Finding:
    """Weights are there and can be read, and a tokenizer lies beside them."""
    place = model_folder(model)
    if place is None:
        return Finding(Level.GOOD, "model", f"{model}, without files")
    weights = weights_of(place)
    if not weights:
        what = "is not there" if not place.exists() else "holds no .safetensors or .pth file"
        return Finding(
            Level.BAD, "model", f"{place} {what}", "give --model demo, counting, or a model's folder or file"
        )
    for file in weights:
        try:
            with file.open("rb") as opened:
                empty = not opened.read(1)
        except OSError as error:
            return Finding(Level.BAD, "model", f"{file}: {error.strerror}", "make it readable for this user")
        if empty:
            return Finding(Level.BAD, "model", f"{file} is empty", "fetch the model again")
    folder = place if place.is_dir() else place.parent
    if not any((folder / name).is_file() for name in (TOKENIZER_FILE, WORLD_FILE)):
        remedy = f"put its {TOKENIZER_FILE}, or {WORLD_FILE} for the RWKV World vocabulary, there"
        return Finding(Level.BAD, "model", f"{folder} holds no tokenizer", remedy)
    megabytes = sum(file.stat().st_size for file in weights) / 2**20
    return Finding(Level.GOOD, "model", f"{place}, {megabytes:,.0f} MiB of weights")


def weights_of(place: Path) -> list[Path]:
    """The weight files at a path, which may be one."""
    if place.is_file():
        return [place] if place.suffix in WEIGHTS else []
    try:
        return sorted(file for file in place.iterdir() if file.suffix in WEIGHTS)
    except OSError:
        return []


def store_folder(store: str, environment: Mapping[str, str]) -> Path:
    """The folder of the states."""
    data = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(store).expanduser().absolute() if store else Path(data) / "wkvm"


def store(place: Path) -> Finding:
    """Can be written, has room, and is nobody else's now."""
    existing = place
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    remedy = "choose another folder with --store"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"wkvm")
            file.flush()
            os.fsync(file.fileno())
        space = os.statvfs(existing)
    except OSError as error:
        return Finding(Level.BAD, "store", f"{place} cannot be written: {error.strerror}", remedy)
    free = space.f_bavail * space.f_frsize
    if (place / "LOCK").exists() and _is_locked(place / "LOCK"):
        return Finding(
            Level.NOTE, "store", f"{place} belongs to a running wkvm-core", "a second one needs another --store"
        )
    if free < SPARE_DISK:
        return Finding(
            Level.NOTE, "store", f"{place} has only {free / 2**20:,.0f} MiB free", "states may not fit on it"
        )
    return Finding(Level.GOOD, "store", f"{place}, {free / 2**30:,.1f} GiB free")


def _is_locked(file: Path) -> bool:
    try:
        with file.open("r+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def sockets(environment: Mapping[str, str]) -> Finding:
    """A folder short enough for the path of a socket."""
    try:
        base = base_folder(environment)
    except OSError as error:
        return Finding(Level.BAD, "sockets", str(error), "set XDG_RUNTIME_DIR or TMPDIR")
    longest = len(os.fsencode(base / f"wkvm-{'x' * 8}" / SOCKET_NAME))
    return Finding(Level.GOOD, "sockets", f"in {base}, {longest} of {MAX_SOCKET_PATH} bytes of path")


def port(host: str, number: int, served: str | None, ready: bool) -> Finding:
    """Free, or a wkvm that answers there. `served` is the model that the server there lists, if one does."""
    if ready:
        text = f"{number} of {host}: a ready server answers there" + (f", serving {served}" if served else "")
        return Finding(Level.NOTE, "port", text, "a second one needs another --port")
    bare = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((bare, number))
    except OSError as error:
        what = "is taken by a program that is not ready" if error.errno == errno.EADDRINUSE else str(error.strerror)
        return Finding(Level.BAD, "port", f"{number} of {host} {what}", "choose another with --port")
    return Finding(Level.GOOD, "port", f"{number} of {host} is free")


class _Sizes(msgspec.Struct):
    """What a state's size follows from, in transformers' words."""

    num_hidden_layers: int
    hidden_size: int
    model_type: str = ""
    head_dim: int = 64


class Needs(msgspec.Struct, frozen=True):
    """Memory that a model takes, bytes."""

    weights: int
    slot: int | None
    """None when it cannot be told."""


def needs_of_files(place: Path, state_dtype: str = "float32") -> Needs:
    """From a model's files: the weights as they are stored, and a slot by the config beside them."""
    return Needs(sum(file.stat().st_size for file in weights_of(place)), slot_bytes(place, state_dtype))


def memory(needs: Needs, slots: int | None, available: int, where: str = "available") -> Finding:
    """Room for the weights and the slots asked for; `available` in bytes, `where` says of what."""
    text = f"{available / 2**30:,.1f} GiB {where}"
    left = available - needs.weights
    if left <= 0:
        return Finding(
            Level.BAD, "memory", f"{text}, the weights take {needs.weights / 2**30:,.1f} GiB", "choose a smaller model"
        )
    if needs.slot is None:
        return Finding(Level.GOOD, "memory", text)
    room = left // needs.slot
    text = f"{text}: room for {room:,} slots of {needs.slot:,} bytes"
    if room < (slots or 1):
        return Finding(Level.BAD, "memory", text, f"ask for --slots {room}" if room else "choose a smaller model")
    return Finding(Level.GOOD, "memory", text)


def slot_bytes(place: Path, state_dtype: str = "float32") -> int | None:
    """Bytes of an RWKV-7 state, from the config beside the weights: per layer a [head_dim, head_dim] matrix a head and
    two rows of the hidden size. None when no such config is there."""
    config = (place if place.is_dir() else place.parent) / "config.json"
    try:
        sizes = msgspec.json.decode(config.read_bytes(), type=_Sizes)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not sizes.model_type.startswith("rwkv7"):
        return None
    item = 4 if state_dtype == "float32" else 2
    return sizes.num_hidden_layers * sizes.hidden_size * (sizes.head_dim + 2) * item


def available_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a program may still take, as the kernel and the control group's limit say; None when the kernel does
    not say."""
    try:
        lines = meminfo.read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = (groups / "memory.max").read_text().strip()
    except OSError:
        return available
    return min(available, int(limit)) if limit.isdigit() else available
