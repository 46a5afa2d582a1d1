from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.counting import CountingReference, greedy
from wkvm_core.models.counting import CountingModel
from wkvm_core.models.protocol import Batch, Model

ids = st.integers(0, 255)


def slots(count: int) -> dict[str, torch.Tensor]:
    """A bank as the runner has it: strided by the slot, with foreign bytes around the family."""
    return {"count": torch.zeros(count, 1, 512, dtype=torch.int64)[:, :, :2]}


def batch(rows: Sequence[tuple[Sequence[int], int, int]], wanted: Sequence[int] | None = None) -> Batch:
    """Rows of (tokens, read, write); logits of each row's last token unless told."""
    offsets = [0]
    for tokens, _, _ in rows:
        offsets.append(offsets[-1] + len(tokens))
    places = [end - 1 for end in offsets[1:]] if wanted is None else list(wanted)
    return Batch(
        tokens=torch.tensor([token for tokens, _, _ in rows for token in tokens], dtype=torch.int64),
        offsets=tuple(offsets),
        read=torch.tensor([read for _, read, _ in rows], dtype=torch.int64),
        write=torch.tensor([write for _, _, write in rows], dtype=torch.int64),
        wanted=torch.tensor(places, dtype=torch.int64),
    )


def state_of(bank: dict[str, torch.Tensor], slot: int) -> tuple[int, int]:
    first, second = bank["count"][slot, 0].tolist()
    return first, second


@pytest.fixture(scope="module")
def model() -> CountingModel:
    return CountingModel()


def test_it_is_a_model(model: CountingModel) -> None:
    as_model: Model = model
    assert as_model.layout.slot_bytes == 4096
    assert as_model.vocab_size == 256
    assert as_model.eos_ids == (0,)


@given(st.lists(st.lists(ids, min_size=1, max_size=40), min_size=1, max_size=8))
def test_a_ragged_batch_leaves_the_states_that_plain_integers_predict(rows: list[list[int]]) -> None:
    model, bank = CountingModel(), slots(16)
    logits = model.forward(batch([(tokens, 0, 2 + row) for row, tokens in enumerate(rows)]), bank)
    for row, tokens in enumerate(rows):
        expected = CountingReference().read(tokens)
        assert state_of(bank, 2 + row) == expected.words
        assert int(logits[row].argmax()) == expected.next_token
    assert state_of(bank, 0) == (0, 0)


@given(st.lists(ids, min_size=1, max_size=60), st.data())
def test_any_chunking_gives_the_same_state_and_logits(tokens: list[int], data: st.DataObject) -> None:
    model, bank = CountingModel(), slots(4)
    whole = model.forward(batch([(tokens, 0, 2)]), bank)
    read, start = 0, 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        part = model.forward(batch([(tokens[start:end], read, 3)]), bank)
        read, start = 3, end
    assert state_of(bank, 3) == state_of(bank, 2)
    assert torch.equal(part, whole)


@given(st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=5))
def test_logits_of_every_place_are_those_of_its_prefix(rows: list[list[int]]) -> None:
    model, bank = CountingModel(), slots(16)
    total = sum(map(len, rows))
    logits = model.forward(batch([(tokens, 0, 2 + row) for row, tokens in enumerate(rows)], range(total)), bank)
    place = 0
    for tokens in rows:
        for end in range(1, len(tokens) + 1):
            assert int(logits[place].argmax()) == CountingReference().read(tokens[:end]).next_token
            place += 1


def test_decoding_one_by_one_follows_the_predicted_text(model: CountingModel) -> None:
    bank = slots(4)
    prompt = list(b"to be counted")
    token = int(model.forward(batch([(prompt, 0, 2)]), bank)[0].argmax())
    text = [token]
    for _ in range(63):
        token = int(model.forward(batch([([token], 2, 2)]), bank)[0].argmax())
        text.append(token)
    assert text == greedy(prompt, 64)
    assert bytes(text).decode("ascii").isprintable()
    assert len(set(text)) > 20


def test_a_fork_reads_its_parent_and_leaves_it_alone(model: CountingModel) -> None:
    bank = slots(8)
    model.forward(batch([(b"parent", 0, 2)]), bank)
    model.forward(batch([(b"a", 2, 3), (b"bc", 2, 4)]), bank)
    parent = CountingReference().read(b"parent")
    assert state_of(bank, 2) == parent.words
    assert state_of(bank, 3) == parent.read(b"a").words
    assert state_of(bank, 4) == parent.read(b"bc").words


def test_the_next_token_depends_on_the_count_and_on_the_hash() -> None:
    tokens = {CountingReference(count, 12345).next_token for count in range(64)}
    assert len(tokens) > 20
    assert len({CountingReference(7, digest).next_token for digest in range(64)}) > 20


def test_a_long_launch_is_exact_to_the_last_place(model: CountingModel) -> None:
    bank = slots(8)
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randint(0, 256, (2, 9000), generator=generator).tolist()
    model.forward(batch([(first, 0, 2), (second[:1], 0, 3), (second, 0, 4)]), bank)
    assert state_of(bank, 2) == CountingReference().read(first).words
    assert state_of(bank, 4) == CountingReference().read(second).words


def test_no_two_logits_of_a_row_are_equal_and_the_peak_is_printable(model: CountingModel) -> None:
    bank = slots(300)
    logits = model.forward(batch([([token], 0, 2 + token) for token in range(256)]), bank)
    assert logits.dtype == torch.float32
    for row in logits:
        assert row.unique().numel() == 256
        assert 32 <= int(row.argmax()) <= 126


def test_a_launch_that_wants_no_logits_gives_none(model: CountingModel) -> None:
    bank = slots(4)
    assert model.forward(batch([(b"ab", 0, 2)], wanted=()), bank).shape == (0, 256)
    assert model.forward(batch([(b"c", 2, 2)], wanted=()), bank).shape == (0, 256)
    assert state_of(bank, 2) == CountingReference().read(b"abc").words
