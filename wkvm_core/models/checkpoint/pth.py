"""Tensors of a `.pth` file in torch's zip format, mapped into memory."""

from __future__ import annotations

import mmap
import struct
import zipfile
from pathlib import Path
from typing import Final

import torch

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.opcodes import Placed, read_tensors
from wkvm_proto.names import ErrorCode

_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_TABLE_BYTES = 64 << 20


def read_pth(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file by name, dense and contiguous. Raises Refused(BAD_WEIGHTS).

    Only fp32, fp16 and bf16 tensors in stored (uncompressed) entries are accepted; offsets, shapes and strides are
    compared with the real size of the entries. Pages are private to this process: the file is never written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            tables = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(tables) != 1:
                raise _refuse("it has no single table of contents")
            root = tables[0].removesuffix("data.pkl")
            if entries[tables[0]].file_size > _MAX_TABLE_BYTES:
                raise _refuse("its table of contents is too large")
            table = archive.read(tables[0])
            if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
                raise _refuse("its numbers are not little-endian")
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except zipfile.BadZipFile:
        raise _refuse("it is not a zip archive; save it again with a torch of this decade") from None
    except (OSError, ValueError, NotImplementedError, RuntimeError):
        raise _refuse("it cannot be read") from None
    return {
        name: _tensor(name, placed, pages, entries.get(f"{root}data/{placed.storage.key}"))
        for name, placed in read_tensors(table).items()
    }


def _tensor(name: str, placed: Placed, pages: mmap.mmap, entry: zipfile.ZipInfo | None) -> torch.Tensor:
    dtype = _DTYPES[placed.storage.dtype]
    if entry is None:
        raise _refuse(f"the numbers of {name!r} are missing")
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise _refuse(f"the numbers of {name!r} are compressed or encrypted")
    if placed.storage.numel * dtype.itemsize != entry.file_size:
        raise _refuse(f"the numbers of {name!r} have another size than stated")
    if not _is_dense(placed):
        raise _refuse(f"{name!r} is not dense")
    count = 1
    for length in placed.shape:
        count *= length
    if placed.offset + count > placed.storage.numel:
        raise _refuse(f"{name!r} reaches beyond its numbers")
    if count == 0:
        return torch.empty(placed.shape, dtype=dtype)
    start = _data_start(pages, entry)
    flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=start + placed.offset * dtype.itemsize)
    return flat.as_strided(placed.shape, placed.stride).contiguous()


def _is_dense(placed: Placed) -> bool:
    """The tensor is a permutation of a contiguous one."""
    if len(placed.shape) != len(placed.stride):
        return False
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(placed.stride, placed.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _data_start(pages: mmap.mmap, entry: zipfile.ZipInfo) -> int:
    at = entry.header_offset
    if at < 0 or at + _LOCAL_HEADER.size > len(pages):
        raise _refuse("an entry lies outside the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(pages, at)
    start: int = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if magic != b"PK\x03\x04" or start + entry.file_size > len(pages):
        raise _refuse("an entry lies outside the file")
    return start


def _refuse(why: str) -> Refused:
    return Refused(ErrorCode.BAD_WEIGHTS, f"the .pth file is not accepted: {why}")
