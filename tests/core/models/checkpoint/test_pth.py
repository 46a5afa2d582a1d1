from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.opcodes import read_tensors
from wkvm_core.models.checkpoint.pth import read_pth
from wkvm_proto.names import ErrorCode


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def rezipped(path: Path, replaced: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with some entries' contents replaced, and those of `None` left out."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for name, content in replaced.items():
        entries[next(known for known in entries if known.endswith(name))] = content
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def table_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def refusal(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        read_pth(path)
    assert caught.value.code is ErrorCode.BAD_WEIGHTS
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_dtypes_and_shapes_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "b.weight": torch.randn(7).to(dtype), "s": torch.tensor(2.0).to(dtype)}
    read = read_pth(saved(tmp_path / "x.pth", tensors))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)


def test_views_of_one_storage_are_read_as_they_were(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {"all": base, "row": base[2], "turned": base.t(), "tail": base[1:], "none": base[:0]}
    read = read_pth(saved(tmp_path / "x.pth", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
        assert read[name].is_contiguous()


def test_state_dicts_and_parameters_are_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    for value in (module.state_dict(), OrderedDict(w=module.weight, v=module.bias)):
        read = read_pth(saved(tmp_path / "x.pth", value))
        for name, tensor in value.items():
            assert torch.equal(read[name], tensor)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pth", {"a": torch.zeros(4)})
    before = path.read_bytes()
    read_pth(path)["a"].fill_(1.0)
    assert path.read_bytes() == before


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never run",))


def test_a_call_hidden_in_the_file_is_refused_by_name_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(saved(tmp_path / "x.pth", {"a": torch.zeros(2), "b": Trap()}))
    assert "__builtin__.print" in message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.", "os.system"),
        (b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.", "_rebuild_sparse_tensor"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "builtins.eval"),
        (b"\x80\x02(ios\nsystem\n.", "opcode 0x69"),
        (b"\x80\x02}o.", "opcode 0x6f"),
        (b"\x80\x02K\x01K\x02\x86Q.", "storage"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "OrderedDict"),
        (b"\x80\x02}X\x01\x00\x00\x00aK\x05s.", "'a'"),
        (b"\x80\x02].", "opcode 0x5d"),
        (b"\x80\x02K\x05.", "no dict"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02}K\x01K\x01s.", "name"),
    ],
)
def test_anything_but_a_dict_of_tensors_is_refused_by_name(code: bytes, named: str) -> None:
    with pytest.raises(Refused, match=named) as caught:
        read_tensors(code)
    assert caught.value.code is ErrorCode.BAD_WEIGHTS


def test_a_table_cut_anywhere_or_with_any_byte_changed_is_refused_or_read_never_a_crash(tmp_path: Path) -> None:
    code = table_of(saved(tmp_path / "x.pth", {"a": torch.zeros(3), "b": torch.zeros(2, 2).bfloat16()}))
    for at in range(len(code)):
        with pytest.raises(Refused):
            read_tensors(code[:at])
        for flip in (0xFF, 0x01, 0x80):
            with contextlib.suppress(Refused):
                read_tensors(code[:at] + bytes([code[at] ^ flip]) + code[at + 1 :])


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.zeros(2, dtype=torch.int64)},
        {"a": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(3, 3).to_sparse()},
        {"a": torch.zeros(1).expand(4)},
        {"a": torch.zeros(8)[::2]},
        {"a": {"b": torch.zeros(1)}},
        {"a": 1},
        [torch.zeros(1)],
        torch.zeros(1),
    ],
)
def test_only_dense_plain_floats_in_a_flat_dict_are_accepted(tmp_path: Path, value: object) -> None:
    assert refusal(saved(tmp_path / "x.pth", value))


def test_a_tensor_that_reaches_beyond_its_numbers_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pth", {"a": torch.zeros(3)})
    table = table_of(path)
    longer = table.replace(b"K\x03\x85", b"K\x7f\x85")
    assert longer != table
    assert "beyond" in refusal(rezipped(path, {"data.pkl": longer}))


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({"data/0": b"\0" * 8}, "another size"),
        ({"byteorder": b"big"}, "little-endian"),
        ({"data.pkl": b"\x80\x02}."}, ""),
    ],
)
def test_an_archive_that_does_not_fit_its_table_is_refused(
    tmp_path: Path, replaced: dict[str, bytes], why: str
) -> None:
    path = rezipped(saved(tmp_path / "x.pth", {"a": torch.zeros(3)}), replaced)
    if why:
        assert why in refusal(path)
    else:
        assert read_pth(path) == {}


def test_compressed_numbers_are_refused(tmp_path: Path) -> None:
    path = rezipped(saved(tmp_path / "x.pth", {"a": torch.zeros(30)}), {}, compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(path)


def test_the_old_format_and_other_files_are_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.pth"
    torch.save({"a": torch.zeros(2)}, old, _use_new_zipfile_serialization=False)
    assert "zip" in refusal(old)
    other = tmp_path / "other.pth"
    other.write_bytes(b"")
    assert refusal(other)
    assert refusal(tmp_path / "absent.pth")


def test_a_local_header_that_points_outside_the_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pth", {"a": torch.zeros(3)})
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    struct.pack_into("<HH", content, entry.header_offset + 26, 0xFFFF, 0xFFFF)
    path.write_bytes(content)
    assert "outside" in refusal(path)
