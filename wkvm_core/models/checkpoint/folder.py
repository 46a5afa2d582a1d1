"""What lies at a model's path: its tensors, the files they came from, and the two JSON files beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.pth import read_pth
from wkvm_proto.names import ErrorCode

_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by the names of the file, mapped into memory, on the CPU."""

    name: str
    """Of the folder, or of the file without its suffix."""
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    """config.json, or empty. Of a lone file nothing beside it is read."""
    generation: Mapping[str, Any]
    """generation_config.json, or empty."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a folder with `*.safetensors` or one `.pth`, or such a file itself. Raises Refused(BAD_WEIGHTS).

    No code of the folder is read: `auto_map` and Python files are ignored.
    """
    if path.is_file():
        return Checkpoint(path.stem, path.parent, (path,), _read_file(path), {}, {})
    if not path.is_dir():
        raise Refused(ErrorCode.BAD_WEIGHTS, f"there is no model at {path}")
    files = _weight_files(path)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} is in two files of the model")
            tensors[name] = tensor
    config = read_json(path / "config.json")
    return Checkpoint(path.resolve().name, path, files, tensors, config, read_json(path / "generation_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no such file. Raises Refused(BAD_WEIGHTS)."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"{path.name} is too large")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        raise Refused(ErrorCode.BAD_WEIGHTS, f"{path.name} is not a JSON object") from None


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The index decides when there is one; else all `*.safetensors`; else the one `.pth`."""
    index = read_json(folder / _INDEX)
    if index:
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"{_INDEX} has no weight_map")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise Refused(ErrorCode.BAD_WEIGHTS, f"{_INDEX} names a file outside the folder")
            if not (folder / name).is_file():
                raise Refused(ErrorCode.BAD_WEIGHTS, f"file {name} of the index is missing")
        return tuple(folder / name for name in names)
    if found := sorted(folder.glob("*.safetensors")):
        return tuple(found)
    found = sorted(folder.glob("*.pth"))
    if len(found) != 1:
        many = "more than one .pth file; name the file itself" if found else "no .safetensors and no .pth file"
        raise Refused(ErrorCode.BAD_WEIGHTS, f"the model folder has {many}")
    return (found[0],)


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".pth":
        return read_pth(path)
    if path.suffix != ".safetensors":
        raise Refused(ErrorCode.BAD_WEIGHTS, f"{path.name} is neither .safetensors nor .pth")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError):
        raise Refused(ErrorCode.BAD_WEIGHTS, f"{path.name} is damaged or no safetensors file") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} is {tensor.dtype}, not fp32, fp16 or bf16")
    return tensors
