from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.folder import read_checkpoint
from wkvm_proto.names import ErrorCode


def refusal(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        read_checkpoint(path)
    assert caught.value.code is ErrorCode.BAD_WEIGHTS
    return caught.value.message


def shard(folder: Path, name: str, **tensors: torch.Tensor) -> None:
    save_file(tensors, folder / name)


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards_of_an_index_are_read_as_one(tmp_path: Path) -> None:
    shard(tmp_path, "model-1.safetensors", a=torch.ones(2))
    shard(tmp_path, "model-2.safetensors", b=torch.zeros(3))
    shard(tmp_path, "left-over.safetensors", c=torch.zeros(3))
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    checkpoint = read_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b"}
    assert [file.name for file in checkpoint.files] == ["model-1.safetensors", "model-2.safetensors"]


def test_the_json_files_beside_the_weights_are_read(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", a=torch.ones(2))
    (tmp_path / "config.json").write_text('{"model_type": "rwkv7"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "rwkv7"}
    assert checkpoint.generation == {"eos_token_id": 7}
    assert checkpoint.name == tmp_path.name


def test_python_files_of_a_folder_are_not_run(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", a=torch.ones(2))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    read_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin"])
def test_an_index_may_not_point_out_of_its_folder(tmp_path: Path, place: str) -> None:
    index(tmp_path, {"a": place})
    assert "outside" in refusal(tmp_path)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    index(tmp_path, {"a": "model-9.safetensors"})
    assert "model-9.safetensors" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused_by_name(tmp_path: Path) -> None:
    shard(tmp_path, "1.safetensors", twice=torch.ones(2))
    shard(tmp_path, "2.safetensors", twice=torch.ones(2))
    assert "twice" in refusal(tmp_path)


def test_integer_tensors_are_refused_by_name(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", counts=torch.ones(2, dtype=torch.int32))
    assert "counts" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "damaged" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    shard(tmp_path, "model.safetensors", a=torch.ones(2))
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(tmp_path)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "no .safetensors" in refusal(tmp_path)
    assert "no model" in refusal(tmp_path / "absent")
    (tmp_path / "x.bin").write_bytes(b"x")
    assert "neither" in refusal(tmp_path / "x.bin")
    for name in ("a.pth", "b.pth"):
        torch.save({}, tmp_path / name)
    assert "more than one" in refusal(tmp_path)
