"""Weights of RWKV-7 as the forward pass wants them, packed once from the canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from wkvm_core.kernels.linear import Linear
from wkvm_core.models.rwkv7.names import Sizes

Pack = Callable[[torch.Tensor], Linear]
"""Makes a Linear of a weight `[..., in, out]`."""

_MIX_ORDER: Final = ("x_r", "x_k", "x_v", "x_w", "x_a", "x_g")
"""r, k, v first and v, w, a, g last: each set of matrices meets a contiguous run of mixed inputs."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Scale and shift of a layer or group norm, float32 `[C]`."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Vectors are float32; `n` is 4 (v, w, a, g), and 3 in block 0, which has no v."""

    ln1: Norm
    ln2: Norm
    ln_x: Norm
    mix: torch.Tensor
    """[6, 1, C] in the order r, k, v, w, a, g."""
    rkv: Linear
    """[3, C, C]"""
    down: Linear
    """[n, C, R], ranks padded with zeros to the largest, R."""
    up: Linear
    """[n, R, C]"""
    base: torch.Tensor
    """[n, 1, C]: v0, w0, a0 and zeros for g."""
    k_k: torch.Tensor
    """[C]"""
    k_a: torch.Tensor
    """[C]"""
    k_rest: torch.Tensor
    """[C]: 1 - k_a"""
    r_k: torch.Tensor
    """[H, 64]"""
    output: Linear
    ffn_mix: torch.Tensor
    """[C]"""
    ffn_key: Linear
    ffn_value: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model on one device."""

    embedding: torch.Tensor
    """[V, C] in the dtype of the checkpoint, before ln0."""
    ln0: Norm
    layers: tuple[Layer, ...]
    ln_out: Norm
    head: Linear


def pack_weights(tensors: Mapping[str, torch.Tensor], sizes: Sizes, pack: Pack, device: torch.device) -> Weights:
    """The one hook between checkpoint and forward pass. Everything but the embedding is copied."""

    def vector(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=torch.float32)

    def norm(name: str) -> Norm:
        return Norm(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def matrix(name: str) -> torch.Tensor:
        """[in, out]"""
        return tensors[name].to(device).t()

    def layer(number: int) -> Layer:
        block = f"blocks.{number}."
        att = f"{block}att."
        low = ("v", "w", "a", "g") if number else ("w", "a", "g")
        rank = max(tensors[f"{att}{n}1"].shape[1] for n in low)
        k_a = vector(f"{att}k_a")
        return Layer(
            ln1=norm(f"{block}ln1"),
            ln2=norm(f"{block}ln2"),
            ln_x=norm(f"{att}ln_x"),
            mix=torch.stack([vector(att + name) for name in _MIX_ORDER])[:, None, :],
            rkv=pack(torch.stack([matrix(f"{att}{name}.weight") for name in ("receptance", "key", "value")])),
            down=pack(torch.stack([_widen(tensors[f"{att}{n}1"].to(device), 1, rank) for n in low])),
            up=pack(torch.stack([_widen(tensors[f"{att}{n}2"].to(device), 0, rank) for n in low])),
            base=torch.stack([vector(f"{att}{n}0") if n != "g" else torch.zeros_like(k_a) for n in low])[:, None, :],
            k_k=vector(f"{att}k_k"),
            k_a=k_a,
            k_rest=1.0 - k_a,
            r_k=vector(f"{att}r_k"),
            output=pack(matrix(f"{att}output.weight")),
            ffn_mix=vector(f"{block}ffn.x_k"),
            ffn_key=pack(matrix(f"{block}ffn.key.weight")),
            ffn_value=pack(matrix(f"{block}ffn.value.weight")),
        )

    return Weights(
        embedding=tensors["emb.weight"].to(device),
        ln0=norm("blocks.0.ln0"),
        layers=tuple(layer(number) for number in range(sizes.layers)),
        ln_out=norm("ln_out"),
        head=pack(matrix("head.weight")),
    )


def _widen(matrix: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Zeros up to `length` along the axis."""
    missing = length - matrix.shape[axis]
    return functional.pad(matrix, (0, missing) if axis == 1 else (0, 0, 0, missing))
