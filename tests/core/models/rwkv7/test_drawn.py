from __future__ import annotations

import pytest
import torch

from tests.core.models.launch import bank, launch, run
from wkvm_core.errors import Refused
from wkvm_core.models.open import open_model, sizes_of
from wkvm_core.models.rwkv7.drawn import random_tensors, shape_of
from wkvm_core.models.rwkv7.names import canonical_tensors
from wkvm_core.models.rwkv7.shapes import SHAPES
from wkvm_proto.names import ErrorCode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BILLIONS = {"0.1b": 0.191, "0.4b": 0.451, "1.5b": 1.527, "2.9b": 2.948, "7.2b": 7.199}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_tensors_are_those_of_a_checkpoint_and_the_same_every_time(dtype: torch.dtype, device: str) -> None:
    drawn = random_tensors(SHAPES["tiny"], torch.device(device), dtype)
    tensors, sizes = canonical_tensors(drawn, {})
    assert (sizes.layers, sizes.hidden, sizes.vocab) == (2, 128, 512)
    assert tensors.keys() == drawn.keys()
    again = random_tensors(SHAPES["tiny"], torch.device(device), dtype)
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.device.type) == (dtype, device)
        assert torch.equal(tensor, again[name])


@pytest.mark.parametrize("word", BILLIONS)
def test_a_shape_has_the_parameters_that_its_name_says(word: str) -> None:
    assert SHAPES[word].num_parameters == pytest.approx(1e9 * BILLIONS[word], rel=0.005)


def test_a_model_has_exactly_the_parameters_and_the_slots_that_its_word_says() -> None:
    model = open_model("random:tiny")
    assert model.num_parameters == SHAPES["tiny"].num_parameters
    assert sizes_of("random:tiny", "float32", "float32") == (model.layout.slot_bytes, 4 * model.num_parameters)


def test_logits_spread_and_the_state_stays_bounded_over_a_long_text() -> None:
    model = open_model("random:tiny")
    slots = bank(model.layout, 3)
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(0, model.vocab_size, (2, 1000), generator=generator).tolist()
    run(model, slots, 2, [first])
    early = slots["wkv"][2].clone()
    logits = model.forward(launch([second], [2], [2]), slots)
    late = slots["wkv"][2]
    assert 1.0 < float(logits.std()) < 2.0
    assert float(late.abs().max()) < 50.0
    assert 0.5 < float(late.norm() / early.norm()) < 2.0
    assert float((late - early).norm() / late.norm()) > 0.5


def test_the_fingerprint_tells_sizes_and_dtypes_apart() -> None:
    models = [open_model("random:tiny"), open_model("random:tiny", compute_dtype="bfloat16")]
    assert models[0].fingerprint == open_model("random:tiny").fingerprint
    assert models[0].fingerprint.model != models[1].fingerprint.model
    assert models[0].name == "random:tiny"


@pytest.mark.parametrize("word", ["random:", "random:3b", "random:1.5B"])
def test_a_size_that_there_is_not_is_refused_with_those_that_there_are(word: str) -> None:
    with pytest.raises(Refused, match=r"1\.5b, 2\.9b") as caught:
        shape_of(word)
    assert caught.value.code is ErrorCode.BAD_CONFIG
