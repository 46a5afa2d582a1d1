"""Random RWKV-7 checkpoints, scaled so that the state matters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Of a tiny model; ranks in the order w, a, v, g."""

    hidden: int = 128
    layers: int = 3
    vocab: int = 97
    ranks: tuple[int, int, int, int] = (48, 40, 24, 72)
    ffn: int = 512
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.layers}x{self.hidden}-{self.seed}"


def tiny(shape: Shape, dtype: torch.dtype = torch.float32, *, unused: bool = True) -> dict[str, torch.Tensor]:
    """Tensors by BlinkDL's names and shapes. unused: with v0, v1 and v2 of block 0, as some files have them."""
    generator = torch.Generator().manual_seed(shape.seed)
    c, f, v = shape.hidden, shape.ffn, shape.vocab

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * scale

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator)

    tensors = {"emb.weight": normal(v, c), "head.weight": normal(v, c, scale=c**-0.5)}
    norms = ["ln_out", "blocks.0.ln0"]
    for layer in range(shape.layers):
        block = f"blocks.{layer}."
        att = f"{block}att."
        norms += [f"{block}ln1", f"{block}ln2", f"{att}ln_x"]
        for name in "rwkvag":
            tensors[f"{att}x_{name}"] = uniform(1, 1, c)
        for name, rank, scale, shift in zip("wavg", shape.ranks, (1.0, 0.5, 0.5, 0.0), (-1, 0, 0, 0), strict=True):
            if name != "g":
                tensors[f"{att}{name}0"] = normal(1, 1, c, scale=scale) + shift
            tensors[f"{att}{name}1"] = normal(c, rank, scale=c**-0.5)
            tensors[f"{att}{name}2"] = normal(rank, c, scale=rank**-0.5)
        tensors[f"{att}k_k"] = 0.7 + normal(1, 1, c, scale=0.1)
        tensors[f"{att}k_a"] = 1 + normal(1, 1, c, scale=0.1)
        tensors[f"{att}r_k"] = normal(c // 64, 64, scale=0.1)
        for name in ("receptance", "key", "value", "output"):
            tensors[f"{att}{name}.weight"] = normal(c, c, scale=c**-0.5)
        tensors[f"{block}ffn.x_k"] = uniform(1, 1, c)
        tensors[f"{block}ffn.key.weight"] = normal(f, c, scale=c**-0.5)
        tensors[f"{block}ffn.value.weight"] = normal(c, f, scale=f**-0.5)
    for norm in norms:
        tensors[f"{norm}.weight"] = 1 + normal(c, scale=0.1)
        tensors[f"{norm}.bias"] = normal(c, scale=0.1)
    dropped = () if unused else ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
    return {name: tensor.to(dtype) for name, tensor in tensors.items() if name not in dropped}


def save_pth(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, path)
    return path


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def tokens_of(shape: Shape, count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab, (count,), generator=generator).tolist()
