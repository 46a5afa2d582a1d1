from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.core.models.launch import bank, run
from tests.core.models.rwkv7.tiny import Shape, save_pth, save_safetensors, tiny, tokens_of
from wkvm_core.errors import Refused
from wkvm_core.models.open import DEMO_MODEL, open_model
from wkvm_core.models.rwkv7.names import canonical_tensors, to_hf
from wkvm_proto.names import ErrorCode

SHAPE = Shape()
TOKENS = tokens_of(SHAPE, 50)


def layouts(folder: Path, dtype: torch.dtype) -> dict[str, Path]:
    """The same values as a `.pth`, a file, a sharded folder, and a folder in transformers' layout."""
    tensors = tiny(SHAPE, dtype)
    hf = to_hf(canonical_tensors(tensors, {})[0])
    names = sorted(tensors)
    shards = folder / "sharded"
    for number, part in enumerate((names[::2], names[1::2])):
        save_safetensors(shards / f"{number}.safetensors", {name: tensors[name] for name in part})
    packed = dict(hf)
    for layer in range(SHAPE.layers):
        mixes = [packed.pop(f"model.layers.{layer}.attn.x_{mix}").reshape(-1) for mix in "rwkvag"]
        packed[f"model.layers.{layer}.attn.x_x"] = torch.stack(mixes)
    save_safetensors(folder / "hf" / "model.safetensors", hf)
    save_safetensors(folder / "packed" / "model.safetensors", packed)
    for name in ("hf", "packed"):
        (folder / name / "config.json").write_text(
            json.dumps({"model_type": "rwkv7", "bos_token_id": 1, "eos_token_id": 2, "auto_map": {"AutoConfig": "x.Y"}})
        )
    return {
        "pth": save_pth(folder / "model.pth", tensors),
        "without unused": save_pth(folder / "lean.pth", tiny(SHAPE, dtype, unused=False)),
        "file": save_safetensors(folder / "alone.safetensors", tensors),
        "sharded": shards,
        "hf": folder / "hf",
        "packed": folder / "packed",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_layout_of_equal_values_is_the_same_model(tmp_path: Path, dtype: torch.dtype) -> None:
    seen = {}
    for layout, path in layouts(tmp_path, dtype).items():
        model = open_model(path)
        seen[layout] = (model.fingerprint, run(model, bank(model.layout, 3), 2, [TOKENS]))
        assert model.eos_ids == (0,)
    fingerprint, logits = seen["pth"]
    for layout, (other, others) in seen.items():
        assert other == fingerprint, layout
        assert torch.equal(others, logits), layout


def test_a_folder_made_by_another_converter_is_the_same_model(tmp_path: Path) -> None:
    path = save_pth(tmp_path / "model.pth", tiny(SHAPE))
    program = [sys.executable, "-W", "ignore", "-m", "rwkv7_hf.converter", "--precision", "fp32"]
    subprocess.run(
        [*program, "--input", str(path), "--output", str(tmp_path / "hf")], check=True, capture_output=True, timeout=60
    )
    assert open_model(tmp_path / "hf").fingerprint == open_model(path).fingerprint


def test_parts_of_the_fingerprint_say_what_differs(tmp_path: Path) -> None:
    one = open_model(save_pth(tmp_path / "1.pth", tiny(SHAPE)))
    half = open_model(save_pth(tmp_path / "1.pth", tiny(SHAPE)), compute_dtype="bfloat16")
    other = open_model(save_pth(tmp_path / "2.pth", tiny(Shape(seed=9))))
    assert one.fingerprint.model == half.fingerprint.model != other.fingerprint.model
    assert one.fingerprint.layout == half.fingerprint.layout == other.fingerprint.layout
    assert one.fingerprint.numerics == "float32"
    assert half.fingerprint.numerics == "bfloat16"


@pytest.mark.parametrize(("said", "ids"), [(5, (5,)), ([7, 0, 7], (7, 0)), (None, (0,))])
def test_generation_config_says_which_ids_end_a_text(tmp_path: Path, said: object, ids: tuple[int, ...]) -> None:
    save_safetensors(tmp_path / "model.safetensors", tiny(SHAPE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert open_model(tmp_path).eos_ids == ids


@pytest.mark.parametrize("said", ["0", -1, 97, [], [True], 1.5])
def test_an_end_id_that_is_no_token_is_refused(tmp_path: Path, said: object) -> None:
    save_safetensors(tmp_path / "model.safetensors", tiny(SHAPE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(Refused, match="eos_token_id") as caught:
        open_model(tmp_path)
    assert caught.value.code is ErrorCode.BAD_WEIGHTS


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "rwkv7", "attn": {"layers": [1]}}])
def test_other_families_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    save_safetensors(tmp_path / "model.safetensors", tiny(SHAPE))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused) as caught:
        open_model(tmp_path)
    assert caught.value.code is ErrorCode.BAD_WEIGHTS


def test_what_this_build_cannot_do_is_refused() -> None:
    for options in ({"device": "meta"}, {"compute_dtype": "int8"}, {"state_dtype": "int8"}, {"state_dtype": "float16"}):
        with pytest.raises(Refused) as caught:
            open_model(DEMO_MODEL, **options)  # type: ignore[arg-type]
        assert caught.value.code is ErrorCode.BAD_CONFIG


def test_the_model_that_comes_with_wkvm_opens_and_says_what_it_is() -> None:
    told: list[str] = []
    model = open_model(DEMO_MODEL, progress=told.append)
    assert (model.name, model.family, model.vocab_size, model.eos_ids) == ("wkvm-demo", "rwkv7", 4096, (0,))
    assert [(f.name, f.shape, f.dtype, f.layers) for f in model.layout.families] == [
        ("wkv", (5, 64, 64), "float32", 6),
        ("shift_att", (320,), "float32", 6),
        ("shift_ffn", (320,), "float32", 6),
    ]
    assert told == ["reading weights", "hashing weights", "packing weights"]
    assert {"tokenizer.json", "chat_template.jinja", "MODEL_CARD.md", "ATTRIBUTION.md"} <= {
        file.name for file in DEMO_MODEL.iterdir()
    }
