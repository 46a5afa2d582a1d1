"""From a path to a model: the one place that knows which families there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.fingerprint import cached_fingerprint
from wkvm_core.models.checkpoint.folder import Checkpoint, read_checkpoint
from wkvm_core.models.protocol import Model
from wkvm_core.models.rwkv7 import drawn
from wkvm_core.models.rwkv7.model import InvariantRwkv7, Rwkv7, state_layout
from wkvm_core.models.rwkv7.names import HEAD_SIZE, Sizes, canonical_tensors, is_hf
from wkvm_core.state.layout import DTYPE_BYTES
from wkvm_proto.names import ErrorCode

DEMO_MODEL: Final = Path(__file__).parent.parent / "assets" / "wkvm-demo"
"""The small model that comes with wkvm."""
COUNTING: Final = "counting"

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]
"""Told what is being done, in a few words, before each part of the loading."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What a model is made of."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    """Canonical."""
    sizes: Sizes
    fingerprint: str
    eos_ids: tuple[int, ...]


def has_files(model: str) -> bool:
    """Whether the model lies in files, rather than being one of the words that `open_model` knows."""
    return model != COUNTING and not model.startswith(drawn.PREFIX)


def sizes_of(model: str, compute_dtype: str, state_dtype: str) -> tuple[int, int] | None:
    """Bytes of a slot and of the weights of a model without files, before it is made; None for one with files. Raises
    Refused(BAD_CONFIG) for a word that names no model."""
    if has_files(model):
        return None
    if model == COUNTING:
        from wkvm_core.models.counting import CountingModel

        return CountingModel().layout.slot_bytes, 0
    shape = drawn.shape_of(model)
    sizes = Sizes(shape.layers, shape.hidden, shape.hidden // HEAD_SIZE, 4 * shape.hidden, shape.vocab)
    return state_layout(sizes, state_dtype).slot_bytes, shape.num_parameters * DTYPE_BYTES[compute_dtype]


def open_model(
    path: str | Path,
    *,
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    state_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    deterministic: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Model:
    """The model at the path: a folder (BlinkDL's names or transformers' layout), a `.pth` or `.safetensors` file, or
    a word: `counting`, or `random:SIZE` for RWKV-7 of that shape with random weights. Raises Refused: BAD_WEIGHTS for
    the files, BAD_CONFIG for what this build cannot do."""
    if str(path) == COUNTING:
        from wkvm_core.models.counting import CountingModel

        return CountingModel(device=device)
    target = torch.device(device)
    check_dtypes(target, compute_dtype, state_dtype)
    report = progress or (lambda _: None)
    source = _read(Path(path), report) if has_files(str(path)) else _draw(str(path), target, compute_dtype, report)
    report("packing weights")
    if target.type == "cuda":
        return _on_gpu(source, compute_dtype, state_dtype, target, deterministic=deterministic)
    kind = InvariantRwkv7 if deterministic else Rwkv7
    return kind(
        source.name,
        source.tensors,
        source.sizes,
        fingerprint=source.fingerprint,
        eos_ids=source.eos_ids,
        compute_dtype=compute_dtype,
        device=target,
    )


def check_dtypes(device: torch.device, compute_dtype: str, state_dtype: str) -> None:
    """Raises Refused(BAD_CONFIG) for what no kernel of that device computes with."""
    if device.type not in ("cpu", "cuda"):
        raise Refused(ErrorCode.BAD_CONFIG, f"RWKV-7 has no kernels for device {device.type!r}", param="device")
    for dtype, param in ((compute_dtype, "dtype"), (state_dtype, "state_dtype")):
        if dtype not in _DTYPES:
            message = f"RWKV-7 is served in {', '.join(_DTYPES)}, not in {dtype!r}"
            raise Refused(ErrorCode.BAD_CONFIG, message, param=param)
    if device.type == "cpu" and (compute_dtype == "float16" or state_dtype != "float32"):
        message = f"compute dtype {compute_dtype} with state dtype {state_dtype} is for a GPU; a CPU has float32 states"
        raise Refused(ErrorCode.BAD_CONFIG, message, param="dtype")


def _on_gpu(
    source: _Source, compute_dtype: str, state_dtype: str, device: torch.device, *, deterministic: bool
) -> Model:
    try:
        from wkvm_core.models.rwkv7.gpu import GpuRwkv7, InvariantGpuRwkv7
    except ImportError as error:
        message = f"serving from a GPU takes {error.name}; install wkvm with its `gpu` extra"
        raise Refused(ErrorCode.BAD_CONFIG, message, param="device") from None
    kind = InvariantGpuRwkv7 if deterministic else GpuRwkv7
    return kind(
        source.name,
        source.tensors,
        source.sizes,
        fingerprint=source.fingerprint,
        eos_ids=source.eos_ids,
        compute_dtype=compute_dtype,
        state_dtype=state_dtype,
        device=device,
    )


def _read(path: Path, report: Progress) -> _Source:
    report("reading weights")
    checkpoint = read_checkpoint(path)
    _check_family(checkpoint)
    tensors, sizes = canonical_tensors(checkpoint.tensors, checkpoint.config)
    report("hashing weights")
    fingerprint = cached_fingerprint(tensors, checkpoint.files)
    return _Source(checkpoint.name, tensors, sizes, fingerprint, eos_ids(checkpoint.generation, sizes.vocab))


def _draw(word: str, device: torch.device, compute_dtype: str, report: Progress) -> _Source:
    """Weights in the compute dtype, drawn where they will be used: a large model takes seconds, not minutes."""
    shape = drawn.shape_of(word)
    dtype = _DTYPES[compute_dtype]
    report("drawing weights")
    tensors, sizes = canonical_tensors(drawn.random_tensors(shape, device, dtype), {})
    return _Source(word, tensors, sizes, drawn.random_fingerprint(shape, device, dtype), eos_ids({}, sizes.vocab))


def eos_ids(generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: what generation_config.json says, else 0.

    RWKV ends documents with id 0. Special ids of config.json are not read: folders converted from other families carry
    ids there that contradict the tokenizer. Raises Refused(BAD_WEIGHTS)."""
    said = generation.get("eos_token_id")
    if said is None:
        return (0,)
    ids = said if isinstance(said, list) else [said]
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise Refused(ErrorCode.BAD_WEIGHTS, "eos_token_id of generation_config.json is no token id of this model")
    return tuple(dict.fromkeys(ids))


def _check_family(checkpoint: Checkpoint) -> None:
    said = checkpoint.config.get("model_type")
    if said is not None and said != "rwkv7":
        raise Refused(ErrorCode.BAD_WEIGHTS, f"model type {str(said)[:100]!r} is not served; this build serves rwkv7")
    if checkpoint.config.get("attn") is not None:
        raise Refused(ErrorCode.BAD_WEIGHTS, "RWKV-7 with attention layers (config key attn) is not served")
    if not is_hf(checkpoint.tensors) and "blocks.0.att.r_k" not in checkpoint.tensors:
        raise Refused(ErrorCode.BAD_WEIGHTS, "the tensors are not those of RWKV-7: 'blocks.0.att.r_k' is missing")
