"""Weights of RWKV-7 as the forward pass wants them, packed once from the canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from wkvm_core.kernels.linear import Linear
from wkvm_core.models.rwkv7.names import Sizes

Pack = Callable[[torch.Tensor], Linear]
"""Makes a Linear of a weight `[..., in, out]`."""

MIX_ORDER: Final = ("x_r", "x_k", "x_v", "x_w", "x_a", "x_g")
LOW_ORDER: Final = ("v", "w", "a", "g")
"""The last four mixes are the inputs of the low-rank matrices, in this order."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Scale and shift of a layer or group norm, float32 `[C]`."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Vectors are float32, and so are the low-rank matrices: small, and four in one product."""

    ln1: Norm
    ln2: Norm
    ln_x: Norm
    mix: torch.Tensor
    """[6, 1, C] in the order r, k, v, w, a, g."""
    receptance: Linear
    key: Linear
    value: Linear
    down: torch.Tensor
    """[4, C, R]: v, w, a, g, ranks padded with zeros to the largest of the model, R. Block 0 has zeros for v."""
    up: torch.Tensor
    """[4, R, C]"""
    base: torch.Tensor
    """[4, 1, C]: v0, w0, a0 and zeros for g."""
    k_k_negative: torch.Tensor
    """[C]: -k_k"""
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

    rank: int
    """R, the largest low rank."""

    embedding: torch.Tensor
    """[V, C] in the dtype of the checkpoint, before ln0."""
    ln0: Norm
    layers: tuple[Layer, ...]
    ln_out: Norm
    head: Linear


def pack_weights(tensors: Mapping[str, torch.Tensor], sizes: Sizes, pack: Pack, device: torch.device) -> Weights:
    """The one hook between checkpoint and forward pass. Everything but the embedding is copied."""

    rank = max(tensors[name].shape[1] for name in tensors if name.endswith(tuple(f".att.{n}1" for n in LOW_ORDER)))

    def vector(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=torch.float32)

    def norm(name: str) -> Norm:
        return Norm(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def matrix(name: str) -> torch.Tensor:
        """[in, out]"""
        return tensors[name].to(device).t()

    def padded(name: str, *shape: int) -> torch.Tensor:
        """Zeros up to the shape, and all zeros where there is no such tensor."""
        whole = torch.zeros(shape, device=device)
        if name in tensors:
            whole[tuple(slice(length) for length in tensors[name].shape)] = tensors[name]
        return whole

    def layer(number: int) -> Layer:
        block = f"blocks.{number}."
        att = f"{block}att."
        k_a = vector(f"{att}k_a")
        return Layer(
            ln1=norm(f"{block}ln1"),
            ln2=norm(f"{block}ln2"),
            ln_x=norm(f"{att}ln_x"),
            mix=torch.stack([vector(att + name) for name in MIX_ORDER])[:, None, :],
            receptance=pack(matrix(f"{att}receptance.weight")),
            key=pack(matrix(f"{att}key.weight")),
            value=pack(matrix(f"{att}value.weight")),
            down=torch.stack([padded(f"{att}{n}1", sizes.hidden, rank) for n in LOW_ORDER]),
            up=torch.stack([padded(f"{att}{n}2", rank, sizes.hidden) for n in LOW_ORDER]),
            base=torch.stack([padded(f"{att}{n}0", sizes.hidden) for n in LOW_ORDER])[:, None, :],
            k_k_negative=-vector(f"{att}k_k"),
            k_a=k_a,
            k_rest=1.0 - k_a,
            r_k=vector(f"{att}r_k"),
            output=pack(matrix(f"{att}output.weight")),
            ffn_mix=vector(f"{block}ffn.x_k"),
            ffn_key=pack(matrix(f"{block}ffn.key.weight")),
            ffn_value=pack(matrix(f"{block}ffn.value.weight")),
        )

    return Weights(
        rank=rank,
        embedding=tensors["emb.weight"].to(device),
        ln0=norm("blocks.0.ln0"),
        layers=tuple(layer(number) for number in range(sizes.layers)),
        ln_out=norm("ln_out"),
        head=pack(matrix("head.weight")),
    )
