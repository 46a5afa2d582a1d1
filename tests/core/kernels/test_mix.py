from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.core.kernels.closeness import DTYPES, bound, distance
from tests.core.kernels.exps import DEVICE
from wkvm_core.kernels.mix import gpu, ref

HIDDEN = [64, 192, *(pytest.param(hidden, marks=pytest.mark.gpu) for hidden in (768, 2560, 4096))]
LENGTHS = [(1,), (17, 1, 64, 130), (0, 3, 0, 0, 2, 1, 0)]
LAYERS = 3


@dataclass
class Case:
    """One launch over two banks of shifts `[slots, layers, C]`, of which a layer in the middle is used."""

    x: torch.Tensor
    parts: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor
    mixes: torch.Tensor
    banks: tuple[torch.Tensor, torch.Tensor]
    offsets: tuple[int, ...]
    read: torch.Tensor
    write: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """In float64: the stream, the mixes of the first shift, and the layer's shifts afterwards."""
        own = [tensor.double() for tensor in (self.x, self.weight, self.bias, self.mixes)]
        x, weight, bias, mixes = own
        parts = None if self.parts is None else self.parts.double()
        shifts = [bank[:, 1].double() for bank in self.banks]
        outs = [
            ref.shift_mix(x, parts, weight, bias, mixes, shift, self.offsets, self.read, self.write) for shift in shifts
        ]
        return outs[0][0], outs[0][1], shifts

    def run(
        self, dtype: torch.dtype, *, single: bool = False, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The same of the kernels, with mixes of this dtype; the whole banks instead of the layer's shifts, copied
        first unless `in_place`."""
        tokens, hidden = self.x.shape
        banks = list(self.banks) if in_place else [bank.to(DEVICE, copy=True) for bank in self.banks]
        x, weight, bias, mixes = (own.to(DEVICE) for own in (self.x, self.weight, self.bias, self.mixes))
        parts = None if self.parts is None else self.parts.to(DEVICE)
        read, write = self.read.to(DEVICE), self.write.to(DEVICE)
        bounds = torch.tensor(self.offsets, dtype=torch.int32, device=DEVICE)
        row_of = torch.repeat_interleave(torch.tensor(self.lengths)).to(DEVICE, torch.int32)
        lasts = [torch.full((len(read), hidden), torch.nan, device=DEVICE) for _ in banks]
        x_out = torch.full((tokens, hidden), torch.nan, device=DEVICE)
        outs = [torch.full((len(mixes), tokens, hidden), torch.nan, dtype=dtype, device=DEVICE) for _ in banks]
        for bank, last, out in zip(banks, lasts, outs, strict=True):
            ragged = {} if single else {"bounds": bounds, "row_of": row_of, "last": last}
            gpu.shift_mix(x, parts, weight, bias, mixes, bank[:, 1], read, write, x_out, out, **ragged)
        if not single:
            gpu.commit((lasts[0], lasts[1]), (banks[0][:, 1], banks[1][:, 1]), write, bounds)
        return x_out, outs[0], banks


def mix_case(
    lengths: tuple[int, ...],
    hidden: int,
    *,
    state: torch.dtype = torch.float32,
    parts: int = 2,
    part_dtype: torch.dtype = torch.float32,
    mixes: int = 6,
    size: float = 1.0,
) -> Case:
    """Rows that read a slot and write another; those without tokens read the zero slot and write the sink."""
    generator = torch.Generator().manual_seed(hidden + sum(lengths))

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    rows = len(lengths)
    there = torch.tensor(lengths) > 0
    slots = torch.arange(rows)
    return Case(
        x=normal(offsets[-1], hidden, scale=size),
        parts=normal(parts, offsets[-1], hidden, scale=size).to(part_dtype) if parts else None,
        weight=1 + normal(hidden, scale=0.1),
        bias=normal(hidden, scale=0.1),
        mixes=torch.rand(mixes, hidden, generator=generator),
        banks=tuple(normal(2 + 2 * rows, LAYERS, hidden).to(state) for _ in range(2)),  # type: ignore[arg-type]
        offsets=tuple(offsets),
        read=torch.where(there, 2 + slots, 0),
        write=torch.where(there, 2 + rows + slots, 1),
    )


def assert_agrees(case: Case, dtype: torch.dtype, *, single: bool = False) -> None:
    """Values are near, and of the banks nothing but the layer's written slots has changed."""
    x, out, shifts = case.expected()
    got_x, got, banks = case.run(dtype, single=single)
    assert distance(got_x, x) <= bound(torch.float32)
    assert distance(got, out) <= bound(dtype)
    written = case.write[torch.tensor(case.lengths) > 0]
    for bank, before, shift in zip(banks, case.banks, shifts, strict=True):
        now = bank.cpu()
        assert distance(now[written, 1], shift[written]) <= bound(bank.dtype)
        now[written, 1] = before[written, 1]
        assert torch.equal(now, before)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_mixes_of_ragged_rows_equal_the_reference(lengths: tuple[int, ...], hidden: int) -> None:
    assert_agrees(mix_case(lengths, hidden), torch.float32)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [1, 17])
def test_the_mixes_of_rows_of_one_token_equal_the_reference(rows: int, hidden: int) -> None:
    assert_agrees(mix_case((1,) * rows, hidden), torch.float32, single=True)


@pytest.mark.parametrize("hidden", HIDDEN[1:3])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_every_dtype_of_activations_and_of_states_stays_within_its_bound(
    state: torch.dtype, dtype: torch.dtype, single: bool, hidden: int
) -> None:
    case = mix_case((1, 1, 1) if single else (3, 0, 2), hidden, state=state, part_dtype=dtype, parts=1)
    assert_agrees(case, dtype, single=single)


@pytest.mark.parametrize("hidden", HIDDEN[1:3])
@pytest.mark.parametrize(("parts", "mixes"), [(0, 6), (1, 1), (4, 1)])
def test_any_number_of_parts_is_added_and_of_mixes_made(parts: int, mixes: int, hidden: int) -> None:
    assert_agrees(mix_case((2, 3), hidden, parts=parts, mixes=mixes), torch.float32)
    assert_agrees(mix_case((1, 1), hidden, parts=parts, mixes=mixes), torch.float32, single=True)


@pytest.mark.parametrize("size", [1e-2, 1e4, 1e12])
def test_a_stream_far_from_one_is_normed_as_well(size: float) -> None:
    assert_agrees(mix_case((3, 2), 192, size=size), torch.float32)


@pytest.mark.parametrize("hidden", HIDDEN[1:3])
@pytest.mark.parametrize("single", [False, True])
def test_rows_may_write_the_slots_that_they_read(single: bool, hidden: int) -> None:
    case = mix_case((1, 1, 1) if single else (5, 1, 3), hidden)
    assert_agrees(replace(case, write=case.read), torch.float32, single=single)


@pytest.mark.parametrize("hidden", HIDDEN[1:3])
@pytest.mark.parametrize("single", [False, True])
def test_rows_and_slots_in_another_order_give_the_same_bits(single: bool, hidden: int) -> None:
    lengths = (1, 1, 1, 1) if single else (5, 1, 0, 3)
    case = mix_case(lengths, hidden)
    x, out, banks = case.run(torch.bfloat16, single=single)
    order = [3, 0, 2, 1]
    places = [place for row in order for place in range(case.offsets[row], case.offsets[row + 1])]
    slots = torch.cat((torch.arange(2), 2 + torch.randperm(len(case.banks[0]) - 2)))
    offsets = [0]
    for row in order:
        offsets.append(offsets[-1] + lengths[row])
    assert case.parts is not None
    moved = replace(
        case,
        x=case.x[places],
        parts=case.parts[:, places],
        offsets=tuple(offsets),
        banks=tuple(torch.empty_like(bank).index_copy_(0, slots, bank) for bank in case.banks),  # type: ignore[arg-type]
        read=slots[case.read[order]],
        write=slots[case.write[order]],
    )
    other_x, other, other_banks = moved.run(torch.bfloat16, single=single)
    assert torch.equal(other_x, x[places])
    assert torch.equal(other, out[:, places])
    for bank, before in zip(other_banks, banks, strict=True):
        assert torch.equal(bank[slots.to(DEVICE)], before)


@pytest.mark.parametrize("hidden", HIDDEN[1:3])
@pytest.mark.parametrize("single", [False, True])
def test_nan_in_one_row_changes_no_bit_of_the_others(single: bool, hidden: int) -> None:
    case = mix_case((1, 1, 1) if single else (2, 3, 2), hidden)
    start, end = case.offsets[1:3]
    clean = case.run(torch.float32, single=single)
    dirty_x = case.x.clone()
    dirty_x[start] = torch.nan
    for bank in case.banks:
        bank[case.read[1]] = torch.nan
    dirty = replace(case, x=dirty_x).run(torch.float32, single=single)
    others = [place for place in range(len(case.x)) if not start <= place < end]
    assert dirty[1][:, start].isnan().all()
    assert torch.equal(dirty[0][others], clean[0][others])
    assert torch.equal(dirty[1][:, others], clean[1][:, others])
    for bank, before in zip(dirty[2], clean[2], strict=True):
        assert torch.equal(bank[case.write[[0, 2]].to(DEVICE)], before[case.write[[0, 2]].to(DEVICE)])


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_and_final_norms_equal_the_reference(dtype: torch.dtype, hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    table = torch.randn(50, hidden, generator=generator).to(dtype)
    weight, bias = 1 + 0.1 * torch.randn(hidden, generator=generator), 0.1 * torch.randn(hidden, generator=generator)
    tokens = torch.tensor([0, 49, 7, 7, 11])
    x = torch.empty(5, hidden, device=DEVICE)
    gpu.embed(tokens.to(DEVICE), table.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), x)
    expected = ref.embed(tokens, table.double(), weight.double(), bias.double())
    assert distance(x, expected) <= bound(torch.float32)
    parts = torch.randn(3, 5, hidden, generator=generator)
    wanted = torch.tensor([4, 0, 4])
    out = torch.empty(3, hidden, dtype=dtype, device=DEVICE)
    gpu.final(x, parts.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), wanted.to(DEVICE), out)
    total = (expected + parts.double().sum(0))[wanted]
    normed = torch.nn.functional.layer_norm(total, (hidden,), weight.double(), bias.double(), 1e-5)
    assert distance(out, normed) <= bound(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("single", [False, True])
def test_slots_beyond_two_to_the_31_numbers_of_a_bank_are_reached(single: bool) -> None:
    hidden, stride = 2048, 1 << 27  # 20 slots of 2**27 16-bit numbers: 5 GiB
    case = replace(
        mix_case((1, 1) if single else (2, 3), hidden, state=torch.bfloat16),
        read=torch.tensor([18, 0]),
        write=torch.tensor([19, 17]),
    )
    small = (torch.randn(20, LAYERS, hidden).bfloat16(), torch.randn(20, LAYERS, hidden).bfloat16())
    near = replace(case, banks=small).run(torch.float32, single=single)
    memory = [torch.empty(20, stride, dtype=torch.bfloat16, device=DEVICE) for _ in small]
    far = [own[:, -LAYERS * hidden :].view(20, LAYERS, hidden) for own in memory]
    for view, bank in zip(far, small, strict=True):
        view.copy_(bank)
    reached = replace(case, banks=(far[0], far[1])).run(torch.float32, single=single, in_place=True)
    assert torch.equal(reached[1], near[1])
    assert all(torch.equal(view, bank) for view, bank in zip(far, near[2], strict=True))
