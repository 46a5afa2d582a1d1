"""RWKV-7's weights as the GPU's kernels take them, packed once when the model is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from wkvm_core.kernels.project.groups import GRANULE
from wkvm_core.models.rwkv7.names import Sizes
from wkvm_core.models.rwkv7.weights import LOW_ORDER, MIX_ORDER, Norm

_VECTORS: Final = ("v0", "w0", "a0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias")
_FFN: Final = 256
"""The channel mix is padded to a multiple: its widest tile, and what a warp of the products of few tokens takes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block; matrices `[out, in]` in the compute dtype, vectors float32."""

    ln1: Norm
    ln2: Norm
    mixes: torch.Tensor
    """[6, C]: r, k, v, w, a, g."""
    into: torch.Tensor
    """[3 C + R, C]: receptance, key, value, then the first low-rank matrices of v, w, a, g, each padded to GRANULE."""
    up: torch.Tensor
    """[C, R]: the second ones side by side."""
    vectors: torch.Tensor
    """[8, C]"""
    output: torch.Tensor
    ffn_mix: torch.Tensor
    """[1, C]"""
    ffn_key: torch.Tensor
    ffn_value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model."""

    embedding: torch.Tensor
    """[V, C], as stored."""
    ln0: Norm
    layers: tuple[Layer, ...]
    ln_out: Norm
    head: torch.Tensor
    """[V padded to GRANULE, C]"""
    ranks: tuple[int, ...]
    """Of v, w, a, g, padded to GRANULE."""
    ffn: int
    """Width of the channel mix, padded."""


def pack(tensors: Mapping[str, torch.Tensor], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Weights:
    """Canonical tensors, wherever they are, as weights of the dtype on the device."""
    ranks = tuple(
        rounded_up(max((t.shape[1] for n, t in tensors.items() if n.endswith(f".att.{low}1")), default=0))
        for low in LOW_ORDER
    )
    hidden = sizes.hidden
    width = rounded_up(sizes.ffn, _FFN)

    def vector(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=torch.float32)

    def ffn(name: str, *, down: bool) -> torch.Tensor:
        missing = width - sizes.ffn
        return functional.pad(matrix(name), (0, missing) if down else (0, 0, 0, missing))

    def norm(name: str) -> Norm:
        return Norm(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def matrix(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=dtype).contiguous()

    def low(att: str, name: str, rank: int, *, down: bool) -> torch.Tensor:
        """`[rank, C]` of the first matrix, stored `[C, R]`; `[C, rank]` of the second; zeros if there is none."""
        stored = tensors.get(f"{att}{name}{1 if down else 2}")
        if stored is None:
            return torch.zeros((rank, hidden) if down else (hidden, rank), device=device, dtype=dtype)
        turned = stored.to(device=device, dtype=dtype).t()
        missing = rank - min(stored.shape[1 if down else 0], rank)
        return functional.pad(turned, (0, 0, 0, missing) if down else (0, missing))

    def layer(number: int) -> Layer:
        block = f"blocks.{number}."
        att = f"{block}att."
        vectors = [
            vector(att + n).flatten() if att + n in tensors else torch.zeros(hidden, device=device) for n in _VECTORS
        ]
        downs = [low(att, n, rank, down=True) for n, rank in zip(LOW_ORDER, ranks, strict=True)]
        ups = [low(att, n, rank, down=False) for n, rank in zip(LOW_ORDER, ranks, strict=True)]
        square = [matrix(f"{att}{n}.weight") for n in ("receptance", "key", "value")]
        return Layer(
            ln1=norm(f"{block}ln1"),
            ln2=norm(f"{block}ln2"),
            mixes=torch.stack([vector(att + n) for n in MIX_ORDER]),
            into=torch.cat([*square, *downs]),
            up=torch.cat(ups, 1).contiguous(),
            vectors=torch.stack(vectors),
            output=matrix(f"{att}output.weight"),
            ffn_mix=vector(f"{block}ffn.x_k")[None],
            ffn_key=ffn(f"{block}ffn.key.weight", down=False),
            ffn_value=ffn(f"{block}ffn.value.weight", down=True),
        )

    padded = rounded_up(sizes.vocab)
    return Weights(
        embedding=tensors["emb.weight"].to(device).contiguous(),
        ln0=norm("blocks.0.ln0"),
        layers=tuple(layer(number) for number in range(sizes.layers)),
        ln_out=norm("ln_out"),
        head=functional.pad(matrix("head.weight"), (0, 0, 0, padded - sizes.vocab)),
        ranks=ranks,
        ffn=width,
    )


def rounded_up(count: int, unit: int = GRANULE) -> int:
    """The next multiple."""
    return -(-count // unit) * unit
