from __future__ import annotations

import pytest
import torch

from tests.core.models.rwkv7.tiny import Shape, tiny
from wkvm_core.errors import Refused
from wkvm_core.models.rwkv7.names import canonical_tensors, to_hf
from wkvm_proto.names import ErrorCode

SHAPE = Shape(hidden=64, layers=2, vocab=20, ranks=(16, 8, 24, 40), ffn=96)


def refusal(tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> str:
    with pytest.raises(Refused) as caught:
        canonical_tensors(tensors, config or {})
    assert caught.value.code is ErrorCode.BAD_WEIGHTS
    return caught.value.message


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_vectors_are_squeezed_and_sizes_and_ranks_read_from_the_tensors() -> None:
    found, sizes = canonical_tensors(tiny(SHAPE), {})
    assert (sizes.layers, sizes.hidden, sizes.heads, sizes.ffn, sizes.vocab) == (2, 64, 1, 96, 20)
    assert found["blocks.1.att.x_r"].shape == (64,)
    assert found["blocks.1.att.g1"].shape == (64, 40)


def test_unused_tensors_of_block_0_are_ignored_when_present() -> None:
    assert_same(canonical_tensors(tiny(SHAPE), {})[0], canonical_tensors(tiny(SHAPE, unused=False), {})[0])


def test_the_transformers_layout_leads_to_the_same_tensors() -> None:
    canonical, _ = canonical_tensors(tiny(SHAPE), {})
    hf = to_hf(canonical)
    assert hf["model.layers.1.attn.g_lora.lora.0.weight"].shape == (40, 64)
    assert_same(canonical_tensors(hf, {})[0], canonical)


def test_mixes_packed_into_one_tensor_are_split_in_the_order_r_w_k_v_a_g() -> None:
    canonical, _ = canonical_tensors(tiny(SHAPE), {})
    hf = to_hf(canonical)
    for layer in range(SHAPE.layers):
        names = [f"model.layers.{layer}.attn.x_{mix}" for mix in "rwkvag"]
        hf[f"model.layers.{layer}.attn.x_x"] = torch.stack([hf.pop(name).view(-1) for name in names])
    assert_same(canonical_tensors(hf, {})[0], canonical)


def test_a_tied_head_needs_the_word_of_the_config() -> None:
    hf = to_hf(canonical_tensors(tiny(SHAPE), {})[0])
    del hf["lm_head.weight"]
    assert "head.weight" in refusal(hf)
    assert "head.weight" in refusal(hf, {"tie_word_embeddings": False})
    tied, _ = canonical_tensors(hf, {"tie_word_embeddings": True})
    assert torch.equal(tied["head.weight"], tied["emb.weight"])


def test_an_own_head_is_kept_whatever_the_config_says() -> None:
    hf = to_hf(canonical_tensors(tiny(SHAPE), {})[0])
    kept, _ = canonical_tensors(hf, {"tie_word_embeddings": True})
    assert torch.equal(kept["head.weight"], tiny(SHAPE)["head.weight"])


@pytest.mark.parametrize("name", sorted(tiny(SHAPE, unused=False)))
def test_every_missing_tensor_is_refused_by_name(name: str) -> None:
    tensors = tiny(SHAPE)
    del tensors[name]
    assert name in refusal(tensors)


@pytest.mark.parametrize("name", sorted(tiny(SHAPE, unused=False)))
def test_every_tensor_of_another_shape_is_refused_by_name(name: str) -> None:
    tensors = tiny(SHAPE)
    tensors[name] = torch.zeros(3, 5, 7)
    assert name in refusal(tensors) or "heads" in refusal(tensors)


@pytest.mark.parametrize("name", ["blocks.0.ffn.s_emb.weight", "blocks.1.att.k2", "extra", "blocks.x.att.k_k"])
def test_a_tensor_that_is_none_of_rwkv7s_is_refused_by_name(name: str) -> None:
    assert name in refusal(tiny(SHAPE) | {name: torch.zeros(4)})


def test_heads_of_another_size_are_refused() -> None:
    assert "heads of 64" in refusal(tiny(SHAPE) | {"blocks.0.att.r_k": torch.zeros(2, 32)})


def test_a_gap_among_the_blocks_is_refused_by_name() -> None:
    tensors = {name.replace("blocks.1.", "blocks.5."): tensor for name, tensor in tiny(SHAPE).items()}
    assert "blocks.1." in refusal(tensors)
