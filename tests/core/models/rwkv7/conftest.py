from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.core.models.rwkv7.tiny import Shape, save_pth, tiny, tokens_of
from wkvm_core.models.open import DEMO_MODEL, open_model
from wkvm_core.models.protocol import Model

SHAPES = (
    Shape(),
    Shape(hidden=64, layers=2, vocab=50, ranks=(16, 8, 8, 32), ffn=160, seed=1),
    Shape(hidden=320, layers=4, vocab=200, ranks=(32, 64, 16, 96), ffn=1280, seed=2),
)
GREEDY = 120


@dataclass(frozen=True)
class Case:
    """One checkpoint and what the `rwkv` package makes of it in float32."""

    checkpoint: Path
    tokens: list[int]
    logits: torch.Tensor
    """[tokens, vocab]"""
    state: dict[str, torch.Tensor]
    """By family, `[layers, *shape]`."""
    greedy: list[int]

    def model(self, **options: object) -> Model:
        return open_model(self.checkpoint, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """The tiny shapes, then the model that comes with wkvm."""
    folder = tmp_path_factory.mktemp("rwkv")
    given = [(save_pth(folder / f"{shape}.pth", tiny(shape)), tokens_of(shape, 150)) for shape in SHAPES]
    demo = load_file(DEMO_MODEL / "model.safetensors")
    given.append((save_pth(folder / "demo.pth", demo), tokens_of(Shape(vocab=4096), 60)))
    (folder / "cases.json").write_text(
        json.dumps([{"checkpoint": str(path), "tokens": tokens, "greedy": GREEDY} for path, tokens in given])
    )
    script = Path(__file__).with_name("package.py")
    arguments = [sys.executable, "-W", "ignore", str(script), str(folder / "cases.json"), str(folder / "out")]
    subprocess.run(arguments, check=True, capture_output=True)
    out = load_file(folder / "out")
    return [
        Case(
            path,
            tokens,
            out[f"logits.{i}"],
            {"wkv": out[f"wkv.{i}"], "shift_att": out[f"att.{i}"], "shift_ffn": out[f"ffn.{i}"]},
            out[f"greedy.{i}"].tolist(),
        )
        for i, (path, tokens) in enumerate(given)
    ]


@pytest.fixture(params=range(len(SHAPES) + 1), ids=[*map(str, SHAPES), "wkvm-demo"])
def case(request: pytest.FixtureRequest, cases: list[Case]) -> Case:
    return cases[request.param]
