"""RWKV-7 models of true shape whose weights are drawn at random: they say nothing, at the speed of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from blake3 import blake3

from wkvm_core.errors import Refused
from wkvm_core.models.rwkv7.names import HEAD_SIZE, LOW_RANKS, MIXES
from wkvm_core.models.rwkv7.shapes import SHAPES, Shape
from wkvm_proto.names import ErrorCode

PREFIX: Final = "random:"
"""`random:1.5b`; sizes in `SHAPES`."""
_SEED: Final = 0
_DEFINITION: Final = "wkvm random RWKV-7 1"
_SLOWEST, _FASTEST = -6.5, -1.5
"""Logits of the decays of a block's first and last channel, about those that training begins with: a channel forgets
half in 760 tokens at one end and in 6 at the other."""


def shape_of(word: str) -> Shape:
    """The shape that `random:SIZE` names. Raises Refused(BAD_CONFIG)."""
    size = word.removeprefix(PREFIX)
    if size not in SHAPES:
        raise Refused(ErrorCode.BAD_CONFIG, f"there is no model {word!r}; sizes are {', '.join(SHAPES)}", param="model")
    return SHAPES[size]


def random_tensors(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Canonical tensors, always the same on one kind of device and version of torch.

    Scales keep the residual stream near 1 and the state bounded over any length, and spread logits by about 1.5."""
    generator = torch.Generator(device).manual_seed(_SEED)
    c = shape.hidden

    def normal(*size: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(scale).add_(mean)

    def matrix(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out, into, scale=gain * into**-0.5)

    def norm(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", normal(c, scale=0.1, mean=1.0)
        yield f"{name}.bias", normal(c, scale=0.1)

    def block(number: int) -> Iterator[tuple[str, torch.Tensor]]:
        depth = number / max(shape.layers - 1, 1)
        added = (2 * shape.layers) ** -0.5  # so that the blocks together add about what came in
        for name in ("ln0", "ln1", "ln2", "att.ln_x") if number == 0 else ("ln1", "ln2", "att.ln_x"):
            yield from norm(name)
        for name in MIXES:
            yield f"att.{name}", torch.rand(c, generator=generator, device=device, dtype=dtype)
        for name, rank in zip(LOW_RANKS, shape.ranks, strict=True):
            if name == "v" and number == 0:
                continue
            if name == "w":
                channel = torch.linspace(0.0, 1.0, c, device=device) ** (0.85 + depth**0.5)
                yield "att.w0", (_SLOWEST + (_FASTEST - _SLOWEST) * channel).to(dtype)
            elif name != "g":
                yield f"att.{name}0", normal(c, scale=0.3)
            yield f"att.{name}1", normal(c, rank, scale=c**-0.5)
            yield f"att.{name}2", normal(rank, c, scale=(1.5 if name == "g" else 0.2) * rank**-0.5)
        yield "att.k_k", normal(c, scale=0.1, mean=0.7)
        yield "att.k_a", normal(c, scale=0.1, mean=1.0)
        yield "att.r_k", normal(c // HEAD_SIZE, HEAD_SIZE, scale=0.1)
        yield "att.receptance.weight", matrix(c, c)
        yield "att.key.weight", matrix(c, c, 0.3)
        yield "att.value.weight", matrix(c, c)
        yield "att.output.weight", matrix(c, c, added)
        yield "ffn.x_k", torch.rand(c, generator=generator, device=device, dtype=dtype)
        yield "ffn.key.weight", matrix(4 * c, c)
        yield "ffn.value.weight", matrix(c, 4 * c, added)

    tensors = {"emb.weight": normal(shape.vocab, c, scale=1.0), "head.weight": matrix(shape.vocab, c, 1.5)}
    tensors.update(norm("ln_out"))
    for number in range(shape.layers):
        tensors.update((f"blocks.{number}.{name}", tensor) for name, tensor in block(number))
    return tensors


def random_fingerprint(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """The *model* part, of what decides the values rather than of the values."""
    said = f"{_DEFINITION}, seed {_SEED}, {shape}, {dtype}, {device.type}, torch {torch.__version__}"
    return blake3(said.encode()).hexdigest()
