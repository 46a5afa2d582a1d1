"""The fused operations of WKV-7 on the GPU, each implementation against `ref.attend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.core.kernels.closeness import DTYPES, bound, distance
from tests.core.kernels.exps import DEVICE
from wkvm_core.kernels.wkv7 import gpu, ref

LAYERS = 3
FLOAT = torch.float32


@dataclass(frozen=True)
class Dtypes:
    """Of states, of activations, and of the planes between preparing and scanning."""

    state: torch.dtype = FLOAT
    values: torch.dtype = FLOAT
    planes: torch.dtype = FLOAT
    dither: bool = True


def triton(dtypes: Dtypes) -> Any:
    return gpu.Wkv7(dtypes.state, dither=dtypes.dither)


def cuda(dtypes: Dtypes) -> Any:
    from wkvm_core.kernels.wkv7.cuda import Wkv7

    return Wkv7(dtypes.state, dtypes.values, DEVICE, plane_dtype=dtypes.planes, dither=dtypes.dither)


Made = Callable[[Dtypes], Any]
MADE = [triton, pytest.param(cuda, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _no_number_of_rows_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the kernel for many rows is tried with few as well."""
    if torch.cuda.is_available():
        from wkvm_core.kernels.wkv7 import cuda as module

        monkeypatch.setattr(module, "_MANY", 0)


@dataclass
class Case:
    """The inputs of one launch over a bank of states `[slots, layers, heads, 64, 64]`, of which one layer is used."""

    bank: torch.Tensor
    rkv: torch.Tensor
    low: torch.Tensor
    v_first: torch.Tensor
    vectors: torch.Tensor
    lengths: tuple[int, ...]
    read: torch.Tensor
    write: torch.Tensor
    dtypes: Dtypes
    first: bool = False

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In float64: the gated output, v of the first layer, and the layer's states afterwards."""
        state, v_first = self.bank[:, 1].double(), self.v_first.double()
        own = [tensor.double() for tensor in (self.rkv, self.low)]
        vectors = self.vectors.double()
        out = ref.attend(state, self.offsets, self.read, self.write, *own, v_first, vectors, first=self.first)
        return out, v_first, state

    def run(self, made: Made, *, in_place: bool = False, **options: int) -> tuple[torch.Tensor, ...]:
        """The same of an implementation, with the whole bank, copied first unless `in_place`: by its step where every
        row has one token, otherwise by its scan."""
        kernels = made(self.dtypes)
        tokens, hidden = self.v_first.shape
        values, planes_dtype = self.dtypes.values, self.dtypes.planes
        bank = self.bank if in_place else self.bank.to(DEVICE, copy=True)
        width = 3 * hidden + 64
        packed = torch.full((tokens, width), torch.nan, dtype=values, device=DEVICE)
        rkv = packed[:, : 3 * hidden].view(tokens, 3, hidden).transpose(0, 1).copy_(self.rkv)  # strided as the model's
        low, vectors = self.low.to(DEVICE), self.vectors.to(DEVICE)
        v_first = (
            torch.full_like(self.v_first, torch.nan).to(DEVICE) if self.first else self.v_first.to(DEVICE, copy=True)
        )
        read, write = self.read.to(DEVICE), self.write.to(DEVICE)
        out = torch.full((tokens, hidden), torch.nan, dtype=values, device=DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # a launch of ours takes slots and states for older than the one before it
        with np.errstate(all="ignore"):  # the interpreter's infinities and its integers that wrap around
            if self.is_single:
                kernels.step(bank[:, 1], read, write, rkv, low, v_first, vectors, out, first=self.first)
            else:
                planes = torch.full((5, tokens, hidden), torch.nan, dtype=planes_dtype, device=DEVICE)
                decay = torch.full((tokens, hidden), torch.nan, device=DEVICE)
                y = torch.full((tokens, hidden), torch.nan, dtype=planes_dtype, device=DEVICE)
                bounds = torch.tensor(self.offsets, dtype=torch.int32, device=DEVICE)
                gpu.prepare(rkv, low, v_first, vectors, planes, decay, first=self.first)
                kernels.scan(bank[:, 1], read, write, bounds, planes, decay, y, **options)
                gpu.finish(y, planes, low, vectors, out)
        return out, v_first, bank

    @property
    def is_single(self) -> bool:
        return all(length == 1 for length in self.lengths)

    def tokens_of(self, row: int) -> list[int]:
        return list(range(self.offsets[row], self.offsets[row + 1]))


def wkv7_case(
    lengths: tuple[int, ...], heads: int, dtypes: Dtypes = Dtypes(), *, first: bool = False, size: float = 1.0
) -> Case:
    """Rows that read a slot and write another; those without tokens read the zero slot and write the sink."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    tokens, hidden, rows = sum(lengths), heads * 64, len(lengths)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale + mean

    vectors = [
        normal(hidden, scale=0.5),
        normal(hidden, scale=3.0, mean=-3.0),
        normal(hidden, scale=0.5),
        normal(hidden, scale=0.1, mean=0.7),
        normal(hidden, scale=0.1, mean=1.0),
        normal(hidden, scale=0.1),
        normal(hidden, scale=0.1, mean=1.0),
        normal(hidden, scale=0.1),
    ]
    there, slots = torch.tensor(lengths) > 0, torch.arange(rows)
    bank = normal(2 + 2 * rows, LAYERS, heads, 64, 64, scale=size)
    bank[0] = 0
    return Case(
        bank=bank.to(dtypes.state),
        rkv=normal(3, tokens, hidden, scale=size).to(dtypes.values),
        low=normal(4, tokens, hidden).to(dtypes.values),
        v_first=normal(tokens, hidden, scale=size).to(dtypes.values),
        vectors=torch.stack(vectors),
        lengths=lengths,
        read=torch.where(there, 2 + slots, 0),
        write=torch.where(there, 2 + rows + slots, 1),
        dtypes=dtypes,
        first=first,
    )


def assert_agrees(case: Case, made: Made, **options: int) -> None:
    """Values are near, and of the bank nothing but the layer's written slots has changed."""
    dtypes = case.dtypes
    out, v_first, state = case.expected()
    got, got_first, bank = case.run(made, **options)
    between = FLOAT if case.is_single else dtypes.planes
    assert distance(got, out) <= bound(dtypes.values, between)
    assert torch.equal(got_first.cpu().double(), v_first)
    written = case.write[torch.tensor(case.lengths) > 0]
    now = bank.cpu()
    assert distance(now[written, 1], state[written]) <= bound(dtypes.state, between)
    now[written, 1] = case.bank[written, 1]
    assert torch.equal(now, case.bank)


RAGGED = [(2,), (17, 1, 64, 130), (0, 3, 0, 0, 9, 1, 0)]
SIZES = [
    *(((1,) * rows, heads) for rows, heads in ((1, 3), (17, 1))),
    *((lengths, 1) for lengths in RAGGED),
    ((3, 0, 2), 3),
    *(
        pytest.param((1,) * rows, heads, marks=pytest.mark.gpu)
        for rows in (1, 17, 64, 130)
        for heads in (12, 33, 40, 64)
    ),
    *(pytest.param(lengths, heads, marks=pytest.mark.gpu) for lengths in RAGGED for heads in (12, 33, 40)),
]
HARD = [
    (1, 1, 1),
    (3, 0, 9, 2),
    pytest.param((1,) * 150, marks=pytest.mark.gpu),
    pytest.param((40, 1, 0, 200, 7), marks=pytest.mark.gpu),
]
"""Rows of one token, and ragged ones."""


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("lengths", "heads"), SIZES)
def test_rows_of_any_length_equal_the_reference(lengths: tuple[int, ...], heads: int, first: bool, made: Made) -> None:
    assert_agrees(wkv7_case(lengths, heads, first=first), made)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_every_dtype_of_states_and_of_activations_stays_within_its_bound(
    state: torch.dtype, values: torch.dtype, lengths: tuple[int, ...], made: Made
) -> None:
    assert_agrees(wkv7_case(lengths, 2, Dtypes(state, values, values)), made)
    assert_agrees(wkv7_case(lengths, 2, Dtypes(state, values, FLOAT, dither=False)), made)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
@pytest.mark.parametrize("size", [1e-2, 6.0])
def test_values_far_from_one_stay_within_the_bound(size: float, lengths: tuple[int, ...], made: Made) -> None:
    assert_agrees(wkv7_case(lengths, 2, Dtypes(torch.bfloat16, torch.float16, FLOAT), size=size), made)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
def test_rows_may_write_the_slots_that_they_read_and_many_may_read_one(lengths: tuple[int, ...], made: Made) -> None:
    case = wkv7_case(lengths, 2)
    assert_agrees(replace(case, write=torch.where(case.read > 0, case.read, 1)), made)
    assert_agrees(replace(case, read=torch.where(case.read > 0, 2, 0)), made)
    assert_agrees(replace(case, read=torch.zeros_like(case.read)), made)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
@pytest.mark.parametrize("dtypes", [Dtypes(), Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)])
def test_rows_and_slots_in_another_order_give_the_same_bits(
    dtypes: Dtypes, lengths: tuple[int, ...], made: Made
) -> None:
    case = wkv7_case(lengths, 2, dtypes)
    out, _, bank = case.run(made)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(lengths), generator=generator)
    places = [place for row in order.tolist() for place in case.tokens_of(row)]
    slots = torch.cat((torch.arange(2), 2 + torch.randperm(len(case.bank) - 2, generator=generator)))
    moved = replace(
        case,
        bank=torch.empty_like(case.bank).index_copy_(0, slots, case.bank),
        rkv=case.rkv[:, places],
        low=case.low[:, places],
        v_first=case.v_first[places],
        lengths=tuple(lengths[row] for row in order),
        read=slots[case.read[order]],
        write=slots[case.write[order]],
    )
    other, _, other_bank = moved.run(made)
    assert torch.equal(other, out[places])
    assert torch.equal(other_bank[slots.to(DEVICE)], bank)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
@pytest.mark.parametrize("dtypes", [Dtypes(), Dtypes(torch.float16, torch.bfloat16, torch.bfloat16)])
def test_nan_in_one_row_changes_no_bit_of_the_others(dtypes: Dtypes, lengths: tuple[int, ...], made: Made) -> None:
    row = len(lengths) - 2
    case = wkv7_case(lengths, 2, dtypes)
    clean, _, bank = case.run(made)
    if not lengths[row]:
        row -= 1
    mine = case.tokens_of(row)
    case.rkv[:, mine], case.low[:, mine] = torch.nan, torch.nan
    case.bank[case.read[row]] = torch.nan
    dirty, _, dirty_bank = case.run(made)
    others = [place for place in range(len(clean)) if place not in mine]
    slots = [slot for slot in range(len(bank)) if slot not in (int(case.read[row]), int(case.write[row]))]
    assert dirty[mine].isnan().all()
    assert torch.equal(dirty[others], clean[others])
    assert torch.equal(dirty_bank[slots], bank[slots])


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("heads", [1, pytest.param(32, marks=pytest.mark.gpu)])
def test_a_scan_gives_the_same_bits_however_it_is_cut(heads: int, made: Made) -> None:
    """With float32 states; a 16-bit state is rounded wherever a piece ends."""
    case = wkv7_case((12,), heads, Dtypes(values=torch.bfloat16))
    whole, _, bank = case.run(made)
    pieces = []
    here = replace(case, bank=case.bank.to(DEVICE, copy=True))
    for start, end in pairwise((0, 2, 3, 10, 12)):
        span = slice(start, end)
        piece = replace(
            here,
            rkv=case.rkv[:, span],
            low=case.low[:, span],
            v_first=case.v_first[span],
            lengths=(end - start, 0),  # the row without tokens keeps a piece of one token from being a step
            read=torch.tensor([case.write[0] if start else case.read[0], 0]),
            write=torch.tensor([case.write[0], 1]),
        )
        pieces.append(piece.run(made, in_place=True)[0])
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(here.bank, bank)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [Dtypes(), Dtypes(torch.float16, torch.float16, torch.float16)])
def test_the_rows_of_a_thread_leave_no_trace_in_the_bits(dtypes: Dtypes) -> None:
    case = wkv7_case((40, 1, 0, 100), 12, dtypes)
    one, two, four = (case.run(cuda, rows=rows) for rows in (1, 2, 4))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[0], four[0])
    assert torch.equal(one[2], two[2])
    assert torch.equal(one[2], four[2])


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1)])
@pytest.mark.parametrize(
    ("state", "dither"),
    [
        (torch.float16, True),
        (torch.bfloat16, True),
        (torch.float16, False),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.gpu),  # the interpreter cuts off
    ],
)
def test_a_16_bit_state_is_rounded_up_with_the_probability_of_the_part_cut_off_or_to_the_nearest(
    state: torch.dtype, dither: bool, lengths: tuple[int, ...], made: Made
) -> None:
    case = wkv7_case(lengths, 2, Dtypes(state))
    full = replace(case, bank=case.bank.float(), dtypes=Dtypes())
    exact = full.run(made)[2][case.write, 1].double()
    step = 2.0 ** exact.abs().log2().floor() * 2.0 ** (-10 if state == torch.float16 else -7)
    stored = replace(case, dtypes=Dtypes(state, dither=dither)).run(made)[2][case.write, 1].double()
    off = ((stored - exact) / step)[exact.abs() > 1e-3]
    assert float(off.abs().max()) <= (1.0 if dither else 0.5) + 0.01
    assert abs(float(off.mean())) <= 0.02
    assert float(off.abs().mean()) == pytest.approx(1 / 3 if dither else 1 / 4, abs=0.02)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", HARD)
def test_equal_launches_give_equal_bits(lengths: tuple[int, ...], made: Made) -> None:
    case = wkv7_case(lengths, 2, Dtypes(torch.bfloat16, torch.float16, torch.float16))
    first, again = case.run(made), case.run(made)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[2], again[2])


@pytest.mark.gpu
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lengths", [(1, 1), (9, 3)])
def test_slots_beyond_two_to_the_31_numbers_of_a_bank_are_reached(lengths: tuple[int, ...], made: Made) -> None:
    heads, stride = 8, 1 << 27  # 20 slots of 2**27 16-bit numbers: 5 GiB
    size = LAYERS * heads * 4096
    case = wkv7_case(lengths, heads, Dtypes(torch.bfloat16))
    small = torch.randn(20, LAYERS, heads, 64, 64).bfloat16()
    case = replace(case, bank=small, read=torch.tensor([18, 0]), write=torch.tensor([19, 17]))
    near = case.run(made)
    memory = torch.empty(20, stride, dtype=torch.bfloat16, device=DEVICE)
    far = memory[:, -size:].view(20, LAYERS, heads, 64, 64)
    far.copy_(small)
    reached = replace(case, bank=far).run(made, in_place=True)
    assert torch.equal(reached[0], near[0])
    assert torch.equal(far, near[2])
