"""The *model* part of a fingerprint: one hash of the canonical tensors, whatever file they came from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

CACHE_NAME = ".wkvm-fingerprint.json"
CACHE_FROM_BYTES = 64 << 20
"""Smaller models are hashed faster than a cache is worth."""


class _Cached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: list[tuple[str, int, int, int]]
    """(name, size in bytes, mtime_ns, inode)"""
    model: str


def model_fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex blake3 over the tensors sorted by name: a JSON line `[name, dtype, shape]`, then the little-endian bytes.

    Equal for `.pth`, safetensors and HF files of equal values and dtypes, because names and orientation are the
    family's own by then."""
    digest = blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        head = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(msgspec.json.encode(head) + b"\n")
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU in row-major order, little-endian; no copy if it is dense."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def cached_fingerprint(
    tensors: Mapping[str, torch.Tensor], files: Sequence[Path], *, cache_from_bytes: int = CACHE_FROM_BYTES
) -> str:
    """`model_fingerprint`, remembered beside the weights while size, mtime and inode of every file stay the same.

    Where the folder cannot be written it is computed every time."""
    cache = files[0].parent / CACHE_NAME
    stats = [(file.name, file.stat()) for file in files]
    key = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
    if sum(size for _, size, _, _ in key) < cache_from_bytes:
        return model_fingerprint(tensors)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        known = msgspec.json.decode(cache.read_bytes(), type=_Cached)
        if known.files == key:
            return known.model
    model = model_fingerprint(tensors)
    with contextlib.suppress(OSError):
        _replace(cache, msgspec.json.encode(_Cached(key, model)))
    return model


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=CACHE_NAME)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
