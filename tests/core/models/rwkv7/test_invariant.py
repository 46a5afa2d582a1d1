"""Bitwise: a token depends on its own row's past only, whatever is launched with it and however it is cut."""

from __future__ import annotations

import random

import pytest
import torch

from tests.core.models.launch import bank, cut, launch, run, slot_of
from tests.core.models.rwkv7.conftest import Case
from wkvm_core.models.checkpoint.pth import read_pth
from wkvm_core.models.protocol import Model
from wkvm_core.models.rwkv7.model import InvariantRwkv7, tile_tokens
from wkvm_core.models.rwkv7.names import Sizes, canonical_tensors


@pytest.fixture(params=["float32", "bfloat16"])
def model(case: Case, request: pytest.FixtureRequest) -> Model:
    return case.model(deterministic=True, compute_dtype=request.param)


def alone(model: Model, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    families = bank(model.layout, 3)
    return run(model, families, 2, [[token] for token in tokens]), slot_of(families, 2).clone()


def test_every_chunking_gives_the_same_bits_as_token_by_token(model: Model, case: Case) -> None:
    tokens = case.tokens[:45]
    logits, state = alone(model, tokens)
    chance = random.Random(3)
    chunkings = [[], [1], [16], [44], [15, 16, 17], *([chance.randrange(45) for _ in range(5)] for _ in range(6))]
    for borders in chunkings:
        families = bank(model.layout, 3)
        assert torch.equal(run(model, families, 2, cut(tokens, borders)), logits), borders
        assert torch.equal(slot_of(families, 2), state), borders


def test_every_batch_size_and_row_gives_the_same_bits(model: Model, case: Case) -> None:
    prompt, last = case.tokens[:20], case.tokens[20]
    logits, state = alone(model, [*prompt, last])
    chance = random.Random(5)
    families = bank(model.layout, 40)
    run(model, families, 2, [prompt])
    for rows in range(1, 34):
        place = chance.randrange(rows)
        reads, writes = list(range(4, 4 + rows)), list(range(4, 4 + rows))
        reads[place], writes[place] = 2, 3
        tokens = [[chance.randrange(model.vocab_size)] for _ in range(rows)]
        tokens[place] = [last]
        got = model.forward(launch(tokens, reads, writes), families)[place]
        assert torch.equal(got, logits[-1]), (rows, place)
        assert torch.equal(slot_of(families, 3), state), (rows, place)


def test_ragged_neighbours_change_no_bit(model: Model, case: Case) -> None:
    tokens = case.tokens[:50]
    logits, state = alone(model, tokens)
    chance = random.Random(13)
    for _ in range(4):
        families = bank(model.layout, 9)
        position, seen = 0, []
        while position < len(tokens):
            mine = tokens[position : position + chance.choice((1, 1, 7, 16, 23))]
            rows = [
                [chance.randrange(model.vocab_size) for _ in range(chance.choice((1, 1, 5, 18)))]
                for _ in range(chance.randrange(5))
            ]
            seats = list(range(3, 3 + len(rows)))
            place = chance.randrange(len(rows) + 1)
            rows.insert(place, mine)
            seats.insert(place, 2)
            batch = launch(rows, [0 if seat == 2 and not position else seat for seat in seats], seats)
            start = batch.offsets[place]
            seen.append(model.forward(batch, families)[start : start + len(mine)])
            position += len(mine)
        assert torch.equal(torch.cat(seen), logits)
        assert torch.equal(slot_of(families, 2), state)


def test_one_thread_and_two_give_the_same_bits(model: Model, case: Case) -> None:
    tokens = case.tokens[:18]
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        families = bank(model.layout, 3)
        results.append((run(model, families, 2, cut(tokens, [15, 17])), slot_of(families, 2).clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_fork_and_a_spare_slot_give_the_same_bits(model: Model, case: Case) -> None:
    tokens = case.tokens[:30]
    logits, state = alone(model, tokens)
    families = bank(model.layout, 8)
    run(model, families, 2, [tokens[:12]])
    forked = model.forward(launch([tokens[12:29], tokens[12:13], tokens[12:29]], [2, 2, 2], [3, 4, 5]), families)
    assert torch.equal(forked[:17], logits[12:29])
    assert torch.equal(forked[18:], logits[12:29])
    assert torch.equal(model.forward(launch([tokens[29:]], [5], [6]), families)[0], logits[29])
    assert torch.equal(slot_of(families, 6), state)


class UnevenRows(InvariantRwkv7):
    """A machine whose product rounds differently in another row."""

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return super()._logits(x) + torch.arange(x.shape[0])[:, None] * 1e-5


@pytest.mark.parametrize(("kind", "single"), [(InvariantRwkv7, False), (UnevenRows, True)])
def test_where_a_product_does_not_treat_rows_alike_a_tile_is_one_token(
    cases: list[Case], kind: type[InvariantRwkv7], single: bool
) -> None:
    tensors, sizes = canonical_tensors(read_pth(cases[0].checkpoint), {})
    device = torch.device("cpu")
    model = kind("x", tensors, sizes, fingerprint="", eos_ids=(0,), compute_dtype="float32", device=device)
    assert model.tile == (1 if single else tile_tokens(sizes))
    logits = run(model, bank(model.layout, 3), 2, [cases[0].tokens[:20]])
    assert torch.equal(logits, run(model, bank(model.layout, 3), 2, cut(cases[0].tokens[:20], [3, 4])))


@pytest.mark.parametrize(("hidden", "tokens"), [(320, 16), (768, 7), (2048, 2), (4096, 1), (8192, 1)])
def test_a_tile_is_never_so_large_that_torch_splits_an_operation_on_it(hidden: int, tokens: int) -> None:
    assert tile_tokens(Sizes(layers=1, hidden=hidden, heads=hidden // 64, ffn=4 * hidden, vocab=10)) == tokens
