from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from wkvm_core.kernels.wkv7 import cpu, ref

HEADS = 3
KERNELS = [cpu.Wkv7, cpu.SequentialWkv7]
LENGTHS = [(1,), (1, 1, 1), (2,), (31,), (32,), (33,), (64, 64), (17, 1, 64, 100, 1, 2), (1, 65), (130, 3)]


@dataclass
class Case:
    planes: torch.Tensor
    bank: torch.Tensor
    """[slots, layers, heads, 64, 64]"""
    offsets: list[int]
    read: torch.Tensor
    write: torch.Tensor

    def run(self, kernel: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """y, and the whole bank afterwards."""
        bank = self.bank.to(dtype).clone()
        y = kernel(self.planes.to(dtype), self.offsets, self.read, self.write)(bank[:, 1])
        return y, bank


def wkv7_case(lengths: tuple[int, ...], *, in_place: bool = False, decay: float = 3.0) -> Case:
    """decay: spread of the decay's logits; w covers its whole range as it grows."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens, rows = sum(lengths), len(lengths)
    shape = (tokens, HEADS, 64)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    kk = functional.normalize(normal(*shape), dim=-1)
    w = torch.exp(-0.6065306597126334 * torch.sigmoid(normal(*shape) * decay))
    rate = torch.sigmoid(normal(*shape))
    planes = torch.stack([normal(*shape), normal(*shape), normal(*shape), w, -kk, kk * rate, torch.zeros(shape)])
    bank = normal(2 * rows + 2, 2, HEADS, 64, 64)
    bank[0] = 0
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    write = torch.arange(2, 2 + rows)
    read = write if in_place else torch.tensor([0, *([1] * (rows - 1))])
    return Case(planes, bank, offsets, read, write)


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernel", [*KERNELS, ref.Wkv7])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_wkv7_equals_the_reference_in_float64(kernel: Any, lengths: tuple[int, ...], in_place: bool) -> None:
    case = wkv7_case(lengths, in_place=in_place)
    expected, bank = case.run(ref.Wkv7, torch.float64)
    y, got = case.run(kernel)
    assert distance(y, expected) <= 1e-6
    assert distance(got, bank) <= 1e-6


@pytest.mark.parametrize("decay", [0.0, 1.0, 100.0])
def test_the_scan_holds_over_the_whole_range_of_decays(decay: float) -> None:
    case = wkv7_case((200,), decay=decay)
    expected, bank = case.run(ref.Wkv7, torch.float64)
    y, got = case.run(cpu.Wkv7)
    assert distance(y, expected) <= 1e-6
    assert distance(got, bank) <= 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_slots_that_are_not_written_keep_every_bit(kernel: Any, lengths: tuple[int, ...]) -> None:
    case = wkv7_case(lengths)
    _, got = case.run(kernel)
    others = [slot for slot in range(case.bank.shape[0]) if slot not in case.write.tolist()]
    assert torch.equal(got[others], case.bank[others])
    assert torch.equal(got[:, 0], case.bank[:, 0])


def test_many_rows_may_write_the_sink() -> None:
    case = wkv7_case((1, 40, 1))
    case.write[:] = torch.tensor([1, 2, 1])
    case.read[:] = torch.tensor([0, 3, 0])
    y, _ = case.run(cpu.Wkv7)
    expected, _ = case.run(ref.Wkv7, torch.float64)
    assert distance(y, expected) <= 1e-6


def test_the_sequence_gives_the_same_bits_however_it_is_cut() -> None:
    case = wkv7_case((40,), in_place=True)
    whole, bank = case.run(cpu.SequentialWkv7)
    pieces, cut_bank = [], case.bank.clone()
    for start, end in ((0, 1), (1, 17), (17, 40)):
        kernel = cpu.SequentialWkv7(case.planes[:, start:end], [0, end - start], case.read, case.write)
        pieces.append(kernel(cut_bank[:, 1]))
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(cut_bank, bank)
