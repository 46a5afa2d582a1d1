"""Canonical tensors of RWKV-7: BlinkDL's names, vectors squeezed, low-rank matrices input-major.

Files in the layout of transformers are renamed to them, and back. Ranks and sizes are read from the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from wkvm_core.errors import Refused
from wkvm_proto.names import ErrorCode

HEAD_SIZE: Final = 64
MIXES: Final = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
"""Also the order in which older files pack them into one tensor."""
LOW_RANKS: Final = ("w", "a", "v", "g")

_OUTSIDE: Final = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
    "blocks.0.ln0.weight": "model.layers.0.pre_norm.weight",
    "blocks.0.ln0.bias": "model.layers.0.pre_norm.bias",
}
_INSIDE: Final = {
    "ln1.weight": "attn_norm.weight",
    "ln1.bias": "attn_norm.bias",
    "ln2.weight": "ffn_norm.weight",
    "ln2.bias": "ffn_norm.bias",
    **{f"att.{name}": f"attn.{name}" for name in (*MIXES, "k_k", "k_a", "r_k")},
    "att.receptance.weight": "attn.r_proj.weight",
    "att.key.weight": "attn.k_proj.weight",
    "att.value.weight": "attn.v_proj.weight",
    "att.output.weight": "attn.o_proj.weight",
    "att.ln_x.weight": "attn.g_norm.weight",
    "att.ln_x.bias": "attn.g_norm.bias",
    **{f"att.{n}1": f"attn.{n}_lora.lora.0.weight" for n in LOW_RANKS},
    **{f"att.{n}2": f"attn.{n}_lora.lora.2.weight" for n in LOW_RANKS},
    **{f"att.{n}0": f"attn.{n}_lora.lora.2.bias" for n in LOW_RANKS if n != "g"},
    "ffn.x_k": "ffn.x_k",
    "ffn.key.weight": "ffn.key.weight",
    "ffn.value.weight": "ffn.value.weight",
}
_TRANSPOSED: Final = frozenset(f"att.{n}{i}" for n in LOW_RANKS for i in (1, 2))
_UNUSED: Final = frozenset(f"blocks.0.att.v{i}" for i in range(3))
"""Block 0 has no value of an earlier block to mix in; some files carry these all the same."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model, read from its tensors."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int


def is_hf(tensors: Mapping[str, torch.Tensor]) -> bool:
    """The names are those of transformers and flash-linear-attention."""
    return "model.embeddings.weight" in tensors


def canonical_tensors(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], Sizes]:
    """All tensors of the model by canonical name and shape, dtypes as stored, and the model's sizes.

    Raises Refused(BAD_WEIGHTS), naming the tensor, when one is missing, has another shape, or is none of RWKV-7's."""
    blinkdl = _from_hf(tensors, config) if is_hf(tensors) else tensors
    vectors = {name: tensor.reshape(-1) if _is_vector(name) else tensor for name, tensor in blinkdl.items()}
    found = {name: tensor for name, tensor in vectors.items() if name not in _UNUSED}
    sizes = _sizes(found)
    for name, shape in _shapes(found, sizes):
        if name not in found:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} is missing")
        if tuple(found[name].shape) != shape:
            raise Refused(
                ErrorCode.BAD_WEIGHTS, f"tensor {name!r} has shape {tuple(found[name].shape)}, expected {shape}"
            )
    expected = {name for name, _ in _shapes(found, sizes)}
    for name in found:
        if name not in expected:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} does not belong to RWKV-7")
    return found, sizes


def to_hf(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical tensors under the names, orientations and shapes of the transformers layout."""
    hf: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in _OUTSIDE:
            hf[_OUTSIDE[name]] = tensor
            continue
        _, layer, inner = name.split(".", 2)
        value = tensor.t() if inner in _TRANSPOSED else tensor
        if inner.removeprefix("att.") in MIXES:
            value = value.view(1, 1, -1)
        hf[f"model.layers.{layer}.{_INSIDE[inner]}"] = value
    return hf


def _from_hf(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Low-rank matrices transposed back, packed mixes split; a name without a counterpart is kept, to be refused."""
    outside = {hf: name for name, hf in _OUTSIDE.items()}
    inside = {hf: name for name, hf in _INSIDE.items()}
    canonical: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in outside:
            canonical[outside[name]] = tensor
            continue
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if inner == "attn.x_x" and tensor.numel() % len(MIXES) == 0:
            packed = tensor.reshape(len(MIXES), -1)
            canonical |= {f"blocks.{layer}.att.{mix}": packed[i] for i, mix in enumerate(MIXES)}
        elif inner in inside:
            target = inside[inner]
            canonical[f"blocks.{layer}.{target}"] = (
                tensor.t() if target in _TRANSPOSED and tensor.dim() == 2 else tensor
            )
        else:
            canonical[name] = tensor
    if "head.weight" not in canonical and config.get("tie_word_embeddings") is True and "emb.weight" in canonical:
        canonical["head.weight"] = canonical["emb.weight"]
    return canonical


def _is_vector(name: str) -> bool:
    inner = name.rsplit(".", 1)[-1]
    return inner in (*MIXES, "w0", "a0", "v0", "k_k", "k_a", "bias") or ".ln" in f".{name}"


def _sizes(tensors: Mapping[str, torch.Tensor]) -> Sizes:
    for name, dims in (("emb.weight", 2), ("blocks.0.att.r_k", 2), ("blocks.0.ffn.key.weight", 2)):
        if name not in tensors:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} is missing")
        if tensors[name].dim() != dims:
            raise Refused(ErrorCode.BAD_WEIGHTS, f"tensor {name!r} has {tensors[name].dim()} axes, expected {dims}")
    vocab, hidden = tensors["emb.weight"].shape
    heads, head_size = tensors["blocks.0.att.r_k"].shape
    if head_size != HEAD_SIZE or heads * head_size != hidden or hidden == 0:
        raise Refused(
            ErrorCode.BAD_WEIGHTS, f"{heads} heads of {head_size} over {hidden} channels: heads of {HEAD_SIZE} needed"
        )
    layers = 1 + max(int(n) for name in tensors if (n := _layer_of(name)).isdecimal())
    return Sizes(layers, hidden, heads, tensors["blocks.0.ffn.key.weight"].shape[0], vocab)


def _layer_of(name: str) -> str:
    head, _, rest = name.partition(".")
    return rest.partition(".")[0][:6] if head == "blocks" else ""


def _shapes(tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor the model must have, with its shape; a rank is what the file's own `*1` matrix says."""
    c, h, f, v = sizes.hidden, sizes.heads, sizes.ffn, sizes.vocab
    yield from (("emb.weight", (v, c)), ("head.weight", (v, c)), ("ln_out.weight", (c,)), ("ln_out.bias", (c,)))
    for layer in range(sizes.layers):
        block = f"blocks.{layer}."
        for norm in ("ln0", "ln1", "ln2", "att.ln_x") if layer == 0 else ("ln1", "ln2", "att.ln_x"):
            yield from ((f"{block}{norm}.weight", (c,)), (f"{block}{norm}.bias", (c,)))
        for vector in (*MIXES, "w0", "a0", "k_k", "k_a", *(("v0",) if layer else ())):
            yield f"{block}att.{vector}", (c,)
        for n in LOW_RANKS if layer else ("w", "a", "g"):
            down = tensors.get(f"{block}att.{n}1")
            rank = down.shape[1] if down is not None and down.dim() == 2 else 0
            yield from ((f"{block}att.{n}1", (c, rank)), (f"{block}att.{n}2", (rank, c)))
        yield f"{block}att.r_k", (h, HEAD_SIZE)
        for matrix in ("receptance", "key", "value", "output"):
            yield f"{block}att.{matrix}.weight", (c, c)
        yield f"{block}ffn.x_k", (c,)
        yield from ((f"{block}ffn.key.weight", (f, c)), (f"{block}ffn.value.weight", (c, f)))
