"""The model of the GPU against the model of the CPU, which is tested against the `rwkv` package."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from tests.core.kernels.exps import DEVICE
from tests.core.models.launch import Families, bank, cut, distance, launch, run, slot_of
from tests.core.models.rwkv7.tiny import Shape, tiny, tokens_of
from wkvm_core.errors import Refused
from wkvm_core.models.protocol import Batch, Model
from wkvm_core.models.rwkv7.gpu import GpuRwkv7, InvariantGpuRwkv7
from wkvm_core.models.rwkv7.model import Rwkv7
from wkvm_core.models.rwkv7.names import Sizes, canonical_tensors

BOUNDS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
"""Relative error of logits and of state against float32 on the same weights, by the coarser of the dtypes of products
and of state: a launch rounds about ten times a block, and random weights make no rounding smaller."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MOST = 700
"""Tokens and rows of the largest launch."""


@dataclass(frozen=True)
class Kind:
    """A model of the device: its shape, the dtype of weights and products, that of states, and the tokens of a test."""

    shape: Shape
    compute: str = "float32"
    state: str = "float32"
    tokens: int = 12

    def __str__(self) -> str:
        return f"{self.shape}-{self.compute}-{self.state}"

    @property
    def bound(self) -> float:
        return max(BOUNDS[self.compute], BOUNDS[self.state])

    def prompt(self) -> list[int]:
        return tokens_of(self.shape, self.tokens)

    def reference(self) -> Rwkv7:
        return reference(self.shape, self.compute)

    def made(self, family: type[GpuRwkv7] = GpuRwkv7) -> OnDevice:
        return OnDevice(made(self.shape, self.compute, self.state, family))


# Kept from test to test, which pytest takes in the order of their models: random weights of true width take seconds.


@lru_cache(maxsize=1)
def drawn(shape: Shape, compute: str) -> tuple[dict[str, torch.Tensor], Sizes]:
    """Weights as a checkpoint of the dtype of products has them."""
    return canonical_tensors(tiny(shape, DTYPES[compute]), {})


@lru_cache(maxsize=1)
def reference(shape: Shape, compute: str) -> Rwkv7:
    device = torch.device("cpu")
    return Rwkv7("x", *drawn(shape, compute), fingerprint="", eos_ids=(0,), compute_dtype="float32", device=device)


@lru_cache(maxsize=2)
def made(shape: Shape, compute: str, state: str, family: type[GpuRwkv7]) -> GpuRwkv7:
    model = family(
        "x",
        *drawn(shape, compute),
        fingerprint="",
        eos_ids=(0,),
        compute_dtype=compute,
        state_dtype=state,
        device=DEVICE,
    )
    model.reserve(MOST, MOST)
    return model


class OnDevice:
    """Takes launches as they are made for the CPU, brings them to the device and gives logits that stay. `padding`:
    rows without tokens behind every row of a launch that is not `single`."""

    def __init__(self, model: GpuRwkv7, padding: int = 0) -> None:
        self.model, self.padding = model, padding

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, batch: Batch, families: Families) -> torch.Tensor:
        return self.model.forward(given(batch, 0 if batch.single else self.padding), families).clone()


def given(batch: Batch, padding: int) -> Batch:
    """On the device, with what a ragged launch is given besides; each row followed by so many rows without tokens."""
    lengths = [end - start for start, end in pairwise(batch.offsets)]
    read, write = batch.read.tolist(), batch.write.tolist()
    lengths = [length for own in lengths for length in (own, *[0] * padding)]
    read = [slot for own in read for slot in (own, *[0] * padding)]
    write = [slot for own in write for slot in (own, *[1] * padding)]
    whole = replace(
        batch,
        tokens=batch.tokens.to(DEVICE),
        offsets=(0, *accumulate(lengths)),
        read=torch.tensor(read, device=DEVICE),
        write=torch.tensor(write, device=DEVICE),
        wanted=batch.wanted.to(DEVICE),
    )
    if whole.single:
        return whole
    row_of = [row for row, length in enumerate(lengths) for _ in range(length)]
    return replace(
        whole,
        bounds=torch.tensor(whole.offsets, dtype=torch.int32, device=DEVICE),
        row_of=torch.tensor(row_of, dtype=torch.int32, device=DEVICE),
    )


SMALL = Shape(hidden=64, layers=2, vocab=50, ranks=(16, 8, 8, 32), ffn=160, seed=1)
ODD = Shape(hidden=192, layers=1, vocab=97, ranks=(48, 40, 24, 72), ffn=896)
LARGE = (
    Shape(hidden=192, layers=3, vocab=97, ranks=(48, 40, 24, 72), ffn=896),
    Shape(hidden=768, layers=4, vocab=1000, ranks=(64, 64, 32, 128), ffn=3072),
    Shape(hidden=1024, layers=3, vocab=65_529, ranks=(64, 64, 32, 128), ffn=4096),
    Shape(hidden=2560, layers=2, vocab=8191, ranks=(96, 96, 64, 320), ffn=8992),
    Shape(hidden=4096, layers=2, vocab=4096, ranks=(128, 128, 96, 480), ffn=16_384),
)
NARROW = [Kind(SMALL, "float16", "float16"), Kind(ODD, "float32", "bfloat16")]
"""Dtypes and widths whose values are compared, by the interpreter too; it is too slow for more of them."""
KINDS = [
    Kind(SMALL),
    *(
        pytest.param(Kind(LARGE[number], compute, state, tokens=200), marks=pytest.mark.gpu)
        for number, compute, state in (
            (0, "float16", "float32"),
            (1, "float32", "float32"),
            (1, "float16", "float32"),
            (1, "float16", "float16"),
            (1, "bfloat16", "float32"),
            (1, "bfloat16", "bfloat16"),
            (2, "bfloat16", "float32"),
            (3, "float16", "float32"),
            (4, "bfloat16", "float32"),
        )
    ),
]
FIRM = [
    Kind(SMALL, tokens=7),
    *(
        pytest.param(Kind(LARGE[number], compute, tokens=200), marks=pytest.mark.gpu)
        for number, compute in ((0, "float16"), (1, "float32"), (1, "bfloat16"), (3, "float16"))
    ),
]


@pytest.fixture(autouse=True)
def _infinities() -> Iterator[None]:
    """Of the interpreter, and its integers that wrap around."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=KINDS, ids=str, scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    own: Kind = request.param
    return own


@pytest.fixture(params=FIRM, ids=str, scope="module")
def firm(request: pytest.FixtureRequest) -> Kind:
    """Of a deterministic model."""
    own: Kind = request.param
    return own


def states(families: Families, slots: Sequence[int]) -> torch.Tensor:
    return torch.stack([slot_of(families, slot) for slot in slots]).cpu()


def assert_agrees(kind: Kind, model: Model | OnDevice, pieces: list[list[int]]) -> None:
    """Logits of every token and the state behind them are near to the CPU's; nothing else is written."""
    reference = kind.reference()
    own, expected = bank(model.layout, 4, DEVICE), bank(reference.layout, 4)
    before = states(own, (0, 1, 3))
    logits = run(model, own, 2, pieces)
    assert logits.dtype == torch.float32
    assert logits.shape == (sum(map(len, pieces)), kind.shape.vocab)
    assert distance(logits.cpu(), run(reference, expected, 2, pieces)) <= kind.bound
    for name in own:
        assert distance(own[name][2].cpu(), expected[name][2]) <= kind.bound, name
    assert torch.equal(states(own, (0, 1, 3)), before)


def test_a_prompt_read_at_once_equals_the_model_of_the_cpu(kind: Kind) -> None:
    assert_agrees(kind, kind.made(), [kind.prompt()])


@pytest.mark.parametrize("kind", [*NARROW, *KINDS], indirect=True, ids=str)
def test_chunks_and_single_tokens_equal_the_model_of_the_cpu(kind: Kind) -> None:
    end = kind.tokens
    assert_agrees(kind, kind.made(), cut(kind.prompt(), [1, 2, 7, end - 2, end - 1]))


@pytest.mark.parametrize("shape", [SMALL, *(pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE)], ids=str)
def test_launches_on_both_sides_of_every_border_between_kernels_equal_the_model_of_the_cpu(shape: Shape) -> None:
    """Of as many tokens as there are kernels for; with little to read in the interpreter."""
    sizes = (8, 9, 17) if shape == SMALL else (7, 8, 9, 16, 17, 63, 64, 65, 128, 129, 511, 512, 513)
    kind = Kind(shape) if shape == SMALL else Kind(shape, "bfloat16")
    prompt = tokens_of(shape, sum(sizes))
    assert_agrees(kind, kind.made(), cut(prompt, list(accumulate(sizes))))


def test_a_launch_of_more_tokens_than_our_own_products_take_equals_the_model_of_the_cpu() -> None:
    kind = Kind(replace(SMALL, layers=1), tokens=130)
    assert_agrees(kind, kind.made(), [kind.prompt()])


def mixed(kind: Kind, seed: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Ragged rows, what they read and what they write: fresh ones, ones that go on, and forks of one slot."""
    chance = random.Random(seed)
    longest = 6 if kind.tokens < 100 else 90
    lengths = [1, chance.randint(2, longest), 1, chance.randint(2, longest), 1]
    rows = [[chance.randrange(kind.shape.vocab) for _ in range(length)] for length in lengths]
    return rows, [0, 3, 2, 2, 4], [5, 3, 6, 7, 4]


def filled(kind: Kind, model: Model | OnDevice, device: torch.device | None = None) -> Families:
    """A bank of nine slots, in three of which something was read."""
    families = bank(model.layout, 9, device)
    model.forward(launch([kind.prompt()[slot : slot + 2] for slot in (2, 3, 4)], [0, 0, 0], [2, 3, 4]), families)
    return families


def test_ragged_rows_equal_the_model_of_the_cpu(kind: Kind) -> None:
    model, reference = kind.made(), kind.reference()
    own, expected = filled(kind, model, DEVICE), filled(kind, reference)
    rows, read, write = mixed(kind, 1)
    logits = model.forward(launch(rows, read, write), own)
    assert distance(logits.cpu(), reference.forward(launch(rows, read, write), expected)) <= kind.bound
    for name in own:
        assert distance(own[name][write].cpu(), expected[name][write]) <= kind.bound, name


@pytest.mark.parametrize("decodes", [False, True])
def test_rows_and_slots_in_another_order_give_the_same_bits(kind: Kind, decodes: bool) -> None:
    model = kind.made()
    rows, read, write = mixed(kind, 2)
    if decodes:
        rows = [row[:1] for row in rows]
    families = filled(kind, model, DEVICE)
    batch = launch(rows, read, write)
    logits, state = model.forward(batch, families), states(families, write)
    order = [3, 1, 4, 0, 2]
    families = filled(kind, model, DEVICE)
    other = launch(*([whole[row] for row in order] for whole in (rows, read, write)))  # type: ignore[arg-type]
    moved = model.forward(other, families)
    places = [place for row in order for place in range(batch.offsets[row], batch.offsets[row + 1])]
    assert torch.equal(moved, logits[places])
    assert torch.equal(states(families, write), state)


@pytest.mark.parametrize("family", [GpuRwkv7, InvariantGpuRwkv7])
@pytest.mark.parametrize("padding", [1, pytest.param(3, marks=pytest.mark.gpu)])
def test_rows_without_tokens_change_no_bit_of_the_others(kind: Kind, family: type[GpuRwkv7], padding: int) -> None:
    if family.deterministic:
        kind = replace(kind, state="float32")
    model = kind.made(family)
    results = []
    for rows_without in (0, padding):
        padded = OnDevice(model.model, rows_without)
        families = filled(kind, model, DEVICE)
        logits = padded.forward(launch(*mixed(kind, 3)), families)
        results.append((logits, states(families, range(9))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_as_many_rows_as_tokens_are_no_decode_when_some_rows_have_none(kind: Kind) -> None:
    model = kind.made()
    results = []
    for rows, read, write in (([[5, 6, 7]], [2], [3]), ([[5, 6, 7], [], []], [2, 0, 0], [3, 1, 1])):
        families = filled(kind, model, DEVICE)
        results.append((model.forward(launch(rows, read, write), families), states(families, range(9))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_decodes_padded_with_rows_that_write_the_sink_keep_every_bit(kind: Kind) -> None:
    """Beside rows of others they would be the same: there is one arithmetic for a number of rows."""
    model = kind.made()
    results = []
    for more, read, write in (([[0]] * 3, [0] * 3, [1] * 3), ([[7], [8], [9]], [4, 4, 0], [6, 7, 8])):
        families = filled(kind, model, DEVICE)
        batch = launch([[5], [6], *more], [2, 3, *read], [2, 5, *write], wanted=[0, 1])
        results.append((model.forward(batch, families), states(families, (0, 2, 3, 4, 5))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("decodes", [False, True])
def test_a_row_with_nan_reaches_no_other_row(kind: Kind, decodes: bool) -> None:
    model = kind.made()
    rows = [[7], [8], [9]] if decodes else [[7], [8] * 5, [9] * 3]
    results = []
    for poison in (1.0, float("nan")):
        families = filled(kind, model, DEVICE)
        for view in families.values():
            view[3] = poison
        results.append((model.forward(launch(rows, [2, 3, 4], [2, 3, 4]), families), states(families, (0, 2, 4))))
    (clean, state), (dirty, state_too) = results
    end = 2 if decodes else 6
    assert dirty[1:end].isnan().all()
    assert torch.equal(dirty[:1], clean[:1])
    assert torch.equal(dirty[end:], clean[end:])
    assert torch.equal(state, state_too)


def test_only_the_wanted_logits_are_returned_in_the_order_asked(kind: Kind) -> None:
    model = kind.made()
    rows, slots = [kind.prompt()[:7], kind.prompt()[:1]], [2, 3]
    everything = model.forward(launch(rows, [0, 0], slots), bank(model.layout, 4, DEVICE))
    chosen = model.forward(launch(rows, [0, 0], slots, wanted=[7, 2]), bank(model.layout, 4, DEVICE))
    assert torch.equal(chosen, everything[[7, 2]])
    none = model.forward(launch(rows, [0, 0], slots, wanted=[]), bank(model.layout, 4, DEVICE))
    assert none.shape == (0, kind.shape.vocab)


# ---------------------------------------------------------------------------------------------- deterministic


def alone(kind: Kind, model: OnDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and state of a prompt, token by token."""
    families = bank(model.layout, 3, DEVICE)
    return run(model, families, 2, [[token] for token in kind.prompt()]), slot_of(families, 2)


def test_the_deterministic_model_equals_the_model_of_the_cpu(firm: Kind) -> None:
    assert_agrees(firm, firm.made(InvariantGpuRwkv7), cut(firm.prompt(), [firm.tokens // 2, firm.tokens // 2 + 1]))


def test_every_chunking_gives_the_same_bits_as_token_by_token(firm: Kind) -> None:
    model = firm.made(InvariantGpuRwkv7)
    logits, state = alone(firm, model)
    chance = random.Random(3)
    for borders in ([], [1, firm.tokens - 1], [chance.randrange(firm.tokens) for _ in range(3)]):
        families = bank(model.layout, 3, DEVICE)
        assert torch.equal(run(model, families, 2, cut(firm.prompt(), borders)), logits), borders
        assert torch.equal(slot_of(families, 2), state), borders


def test_neighbours_change_no_bit_whether_they_read_or_decode(firm: Kind) -> None:
    model = firm.made(InvariantGpuRwkv7)
    logits, state = alone(firm, model)
    chance = random.Random(13)
    for many in (3,) if firm.shape == SMALL else (1, 4, 20):
        families = bank(model.layout, 3 + many, DEVICE)
        position, seen = 0, []
        while position < firm.tokens:
            length = chance.choice((1, 1, 3, 16, 80))
            mine = firm.prompt()[position : position + length]
            rows = [[chance.randrange(firm.shape.vocab)] * chance.choice((1, 1, 5)) for _ in range(many)]
            if length == 1:
                rows = [row[:1] for row in rows]
            seats = list(range(3, 3 + many))
            place = chance.randrange(many + 1)
            rows.insert(place, mine)
            seats.insert(place, 2)
            batch = launch(rows, [0 if seat == 2 and not position else seat for seat in seats], seats)
            start = batch.offsets[place]
            seen.append(model.forward(batch, families)[start : start + len(mine)])
            position += len(mine)
        assert torch.equal(torch.cat(seen), logits)
        assert torch.equal(slot_of(families, 2), state)


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
def test_the_deterministic_model_refuses_a_state_of_16_bits(state: str) -> None:
    with pytest.raises(Refused, match=state):
        Kind(SMALL, state=state).made(InvariantGpuRwkv7)
