"""`python -m wkvm_core.models.convert IN OUT`: any RWKV-7 checkpoint to a folder with one safetensors file."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from tqdm import tqdm

from wkvm_core.errors import Refused
from wkvm_core.models.checkpoint.fingerprint import model_fingerprint, raw_bytes
from wkvm_core.models.checkpoint.folder import read_checkpoint
from wkvm_core.models.rwkv7.names import LOW_RANKS, Sizes, canonical_tensors, to_hf
from wkvm_proto.names import ErrorCode

COMPANIONS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "rwkv_vocab_*.txt",
)
"""Copied when they lie beside the weights: the tokenizer, its template, the ids that end a text. Never code."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def convert(source: Path, target: Path, *, dtype: str | None = None, layout: str = "blinkdl") -> list[str]:
    """Writes the folder `target`, which must not exist, and says in lines what it did.

    dtype: of every tensor, or None to keep each one's own. layout: blinkdl or hf. Raises Refused: BAD_WEIGHTS for the
    source, BAD_CONFIG for the target. The folder appears whole or not at all."""
    if target.exists():
        raise Refused(ErrorCode.BAD_CONFIG, f"{target} exists; nothing is overwritten")
    checkpoint = read_checkpoint(source)
    tensors, sizes = canonical_tensors(checkpoint.tensors, checkpoint.config)
    if dtype is not None:
        tensors = {name: tensor.to(_DTYPES[dtype]) for name, tensor in tensors.items()}
    named = to_hf(tensors) if layout == "hf" else tensors
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_safetensors(scratch / "model.safetensors", named)
        config = json.dumps(_config(tensors, sizes, layout), indent=1) + "\n"
        (scratch / "config.json").write_text(config, encoding="utf-8")
        copied = _copy_companions(checkpoint.folder, scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    count = sum(tensor.numel() for tensor in tensors.values())
    return [
        f"{source}: RWKV-7, {sizes.layers} layers of {sizes.hidden}, vocabulary {sizes.vocab}, {count:,} parameters",
        f"{target}: {len(named)} tensors in {layout} layout, {', '.join(_dtypes_of(tensors))}",
        f"model fingerprint {model_fingerprint(tensors)}",
        f"copied beside it: {', '.join(copied) or 'nothing; add the tokenizer before serving'}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(
        prog="wkvm convert",
        description="Convert an RWKV-7 checkpoint (.pth, safetensors or transformers folder) to a safetensors folder.",
    )
    parser.add_argument("source", metavar="IN", type=Path, help="a .pth or .safetensors file, or a model folder")
    parser.add_argument("target", metavar="OUT", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of every tensor (default: as stored)")
    parser.add_argument("--to", choices=("blinkdl", "hf"), default="blinkdl", help="tensor names (default: blinkdl)")
    given = parser.parse_args(argv)
    try:
        lines = convert(given.source, given.target, dtype=given.dtype, layout=given.to)
    except Refused as refused:
        print(f"wkvm convert: {refused.message}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The safetensors format: u64 length, JSON header padded to 8 bytes, then the tensors' bytes in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file, tqdm(total=end, unit="B", unit_scale=True, desc="writing") as bar:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            bar.update(file.write(raw_bytes(tensor)))


def _config(tensors: Mapping[str, torch.Tensor], sizes: Sizes, layout: str) -> dict[str, Any]:
    ranks = {n: tensors[f"blocks.{min(1, sizes.layers - 1)}.att.{n}1"].shape[1] for n in LOW_RANKS if n != "v"}
    later = tensors.get("blocks.1.att.v1")
    return {
        "model_type": "rwkv7",
        "tensor_names": layout,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_heads": sizes.heads,
        "head_dim": sizes.hidden // sizes.heads,
        "intermediate_size": sizes.ffn,
        "hidden_act": "sqrelu",
        "decay_low_rank_dim": ranks["w"],
        "a_low_rank_dim": ranks["a"],
        "gate_low_rank_dim": ranks["g"],
        "v_low_rank_dim": ranks["a"] if later is None else later.shape[1],
        "norm_eps": 1e-5,
        "norm_bias": True,
        "norm_first": True,
        "tie_word_embeddings": False,
        "torch_dtype": _dtypes_of(tensors)[0],
    }


def _dtypes_of(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})


def _copy_companions(folder: Path, target: Path) -> list[str]:
    found = sorted({file for pattern in COMPANIONS for file in folder.glob(pattern) if file.is_file()})
    for file in found:
        shutil.copyfile(file, target / file.name)
    return [file.name for file in found]


if __name__ == "__main__":
    sys.exit(main())
