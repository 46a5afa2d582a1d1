from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.core.models.rwkv7.tiny import Shape, save_pth, tiny
from wkvm_core.errors import Refused
from wkvm_core.models.convert import convert, main
from wkvm_core.models.open import open_model
from wkvm_core.models.rwkv7.names import canonical_tensors
from wkvm_proto.names import ErrorCode

SHAPE = Shape(hidden=64, layers=2, vocab=30, ranks=(16, 8, 24, 32), ffn=128)


def test_the_program_writes_a_folder_that_opens_as_the_same_model(tmp_path: Path) -> None:
    source = save_pth(tmp_path / "model.pth", tiny(SHAPE, torch.bfloat16))
    program = [sys.executable, "-m", "wkvm_core.models.convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    fingerprint = open_model(tmp_path / "out").fingerprint
    assert fingerprint == open_model(source).fingerprint
    assert fingerprint.model in done.stdout
    assert "writing: 100%" in done.stderr
    again = subprocess.run(program, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "nothing is overwritten" in again.stderr


def test_tensors_are_stored_by_canonical_name_and_shape(tmp_path: Path) -> None:
    tensors = tiny(SHAPE)
    convert(save_pth(tmp_path / "model.pth", tensors), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    canonical, _ = canonical_tensors(tensors, {})
    assert stored.keys() == canonical.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in canonical.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "rwkv7"
    assert [config[f"{name}_low_rank_dim"] for name in ("decay", "a", "v", "gate")] == [16, 8, 24, 32]


def test_there_and_back_through_the_transformers_layout_keeps_every_bit(tmp_path: Path) -> None:
    source = save_pth(tmp_path / "model.pth", tiny(SHAPE))
    convert(source, tmp_path / "hf", layout="hf")
    convert(tmp_path / "hf", tmp_path / "back")
    assert "model.embeddings.weight" in load_file(tmp_path / "hf" / "model.safetensors")
    assert open_model(tmp_path / "back").fingerprint == open_model(source).fingerprint


def test_a_dtype_is_applied_to_every_tensor(tmp_path: Path) -> None:
    convert(save_pth(tmp_path / "model.pth", tiny(SHAPE)), tmp_path / "out", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_the_tokenizer_beside_the_weights_is_copied_and_code_is_not(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_pth(source / "model.pth", tiny(SHAPE))
    for name in ("tokenizer.json", "rwkv_vocab_v20230424.txt", "generation_config.json", "modeling.py", "notes.txt"):
        (source / name).write_text("{}")
    lines = convert(source, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rwkv_vocab_v20230424.txt",
        "tokenizer.json",
    ]
    assert "tokenizer.json" in lines[-1]


def test_a_source_that_is_refused_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tiny(SHAPE)
    del tensors["blocks.1.att.v0"]
    source = save_pth(tmp_path / "model.pth", tensors)
    assert main([str(source), str(tmp_path / "out")]) == 1
    assert "blocks.1.att.v0" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["model.pth"]


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    source = save_pth(tmp_path / "model.pth", tiny(SHAPE))
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path)
    assert caught.value.code is ErrorCode.BAD_CONFIG
