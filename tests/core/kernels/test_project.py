from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.core.kernels.closeness import DTYPES, TENSOR_CORE_BOUND, bound, distance
from tests.core.kernels.exps import DEVICE
from wkvm_core.kernels.project import gpu, ref
from wkvm_core.kernels.project.gpu import Tile
from wkvm_core.kernels.project.groups import Act, Group

FLAT, MIDDLE, TALL = Tile(16, 64, 256, 1, 4, 4), Tile(64, 64, 128, 1, 4, 5), Tile(128, 32, 64, 1, 8, 3)
WIDE = Tile(128, 256, 64, 1, 8, 3)
GROUPS = (Group(128, 1), Group(64, 0, Act.TANH), Group(64, 2, Act.SIGMOID), Group(64, 1, Act.RELU2))
HERE = [*DTYPES[:2], pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""Triton's interpreter takes the bits of bfloat16 for integers when it multiplies matrices."""
SENTINEL = 77.0
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Tile], None]


def triton(x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    gpu.grouped(x, weight, granules, out, tile)


def ahead(x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    gpu.grouped(x, weight, granules, out, tile, ahead=True)


def few(x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    from wkvm_core.kernels.project.cuda import Few

    Few(weight.dtype, weight.device).grouped(x, weight, granules, out, split=tile.split)


@dataclass
class Case:
    """A packed matrix over planes of activations, in the dtype that they are multiplied in."""

    x: torch.Tensor
    weight: torch.Tensor
    groups: tuple[Group, ...]

    def expected(self) -> torch.Tensor:
        return ref.grouped(self.x.double(), self.weight.double(), self.groups)

    def run(self, product: Product, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Parts `[split, T, N]` in this dtype. The operands lie among NaN; what is around the result stays."""
        planes, tokens, inner = self.x.shape
        columns = self.weight.shape[0]
        around = torch.full((planes, tokens + 3, inner + 64), torch.nan, dtype=self.x.dtype, device=DEVICE)
        x = around[:, :tokens, :inner].copy_(self.x)
        above = torch.full((columns + 64, inner), torch.nan, dtype=self.x.dtype, device=DEVICE)
        weight = above[:columns].copy_(self.weight)
        space = torch.full((tile.split + 1, tokens + 3, columns + 64), SENTINEL, dtype=dtype, device=DEVICE)
        with np.errstate(all="ignore"):  # the interpreter's infinities
            product(x, weight, gpu.table(self.groups, DEVICE), space[: tile.split, :tokens, :columns], tile)
        out = space[: tile.split, :tokens, :columns].clone()
        space[: tile.split, :tokens, :columns] = SENTINEL
        assert (space == SENTINEL).all()
        return out


def project_case(tokens: int, inner: int, groups: tuple[Group, ...], dtype: torch.dtype, *, size: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(tokens + inner)
    planes, columns = 1 + max(group.plane for group in groups), sum(group.rows for group in groups)
    x = torch.randn(planes, tokens, inner, generator=generator) * size
    weight = torch.randn(columns, inner, generator=generator) * inner**-0.5
    return Case(x.to(dtype), weight.to(dtype), groups)


def allowed(dtype: torch.dtype, out: torch.dtype) -> float:
    return bound(out) if out == dtype else TENSOR_CORE_BOUND


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(
    ("tokens", "inner", "tile"),
    [
        (1, 192, FLAT),
        (17, 64, FLAT),
        (17, 896, MIDDLE),
        (64, 64, MIDDLE),
        (130, 192, TALL),
        *(
            pytest.param(tokens, inner, tile, marks=pytest.mark.gpu)
            for tokens in (1, 17, 64, 130)
            for inner in (768, 2560, 3584)
            for tile in (FLAT, MIDDLE, TALL)
        ),
    ],
)
def test_groups_of_one_matrix_equal_the_reference(tokens: int, inner: int, tile: Tile, dtype: torch.dtype) -> None:
    case = project_case(tokens, inner, GROUPS, dtype)
    assert distance(case.run(triton, tile, dtype)[0], case.expected()) <= bound(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tokens", [513, 1000])
def test_the_widest_tile_equals_the_reference(tokens: int, dtype: torch.dtype) -> None:
    case = project_case(tokens, 768, (Group(1024, 0, Act.RELU2),), dtype)
    assert distance(case.run(triton, WIDE, dtype)[0], case.expected()) <= bound(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("inner", [1024, 1280, 2048, 2560, 4096])
def test_very_few_tokens_on_the_gpu_equal_the_reference(inner: int, tokens: int, dtype: torch.dtype) -> None:
    case = project_case(tokens, inner, GROUPS, dtype)
    assert distance(case.run(few, FLAT, dtype)[0], case.expected()) <= bound(dtype)


SPLITS: list[tuple[Product, int, torch.dtype, int, Tile]] = [
    (triton, 5, torch.float32, 512, replace(FLAT, split=2)),
    (triton, 70, torch.float16, 1024, replace(MIDDLE, split=4)),
]
GPU_SPLITS: list[tuple[Product, int, torch.dtype, int, Tile]] = [
    (product, tokens, dtype, inner, replace(FLAT, split=split))
    for product, tokens in ((triton, 16), (ahead, 16), (few, 8), (few, 1))
    for dtype in DTYPES[1:]
    for inner, split in ((4096, 2), (8192, 4), (5120, 4), (7168, 1))
]


@pytest.mark.parametrize(
    ("product", "tokens", "dtype", "inner", "tile"),
    [*SPLITS, *(pytest.param(*split, marks=pytest.mark.gpu) for split in GPU_SPLITS)],
)
def test_parts_of_the_inner_axis_add_up_to_the_reference(
    product: Product, tokens: int, dtype: torch.dtype, inner: int, tile: Tile
) -> None:
    case = project_case(tokens, inner, (Group(192),), dtype)
    parts = case.run(product, tile, torch.float32)
    assert distance(parts.sum(0), case.expected()) <= allowed(dtype, torch.float32)
    share = inner // tile.split
    first = Case(case.x[..., :share], case.weight[:, :share], case.groups).expected()
    assert distance(parts[0], first) <= allowed(dtype, torch.float32)


IMPLEMENTATIONS = [
    pytest.param(triton, MIDDLE, 192, 17, torch.float32),
    pytest.param(triton, FLAT, 2560, 17, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(triton, MIDDLE, 2560, 130, torch.float16, marks=pytest.mark.gpu),
    pytest.param(few, FLAT, 2560, 8, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(few, FLAT, 2048, 5, torch.float16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("product", "tile", "inner", "tokens", "dtype"), IMPLEMENTATIONS)
def test_tokens_in_another_order_give_the_same_bits(
    product: Product, tile: Tile, inner: int, tokens: int, dtype: torch.dtype
) -> None:
    case = project_case(tokens, inner, GROUPS, dtype)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    moved = replace(case, x=case.x[:, order])
    assert torch.equal(moved.run(product, tile, dtype), case.run(product, tile, dtype)[:, order.to(DEVICE)])


@pytest.mark.parametrize(("product", "tile", "inner", "tokens", "dtype"), IMPLEMENTATIONS)
def test_nan_in_one_token_changes_no_bit_of_the_others(
    product: Product, tile: Tile, inner: int, tokens: int, dtype: torch.dtype
) -> None:
    case = project_case(tokens, inner, GROUPS, dtype)
    clean = case.run(product, tile, dtype)
    case.x[:, 2] = torch.nan
    dirty = case.run(product, tile, dtype)
    others = [token for token in range(tokens) if token != 2]
    assert dirty[:, 2].isnan().all()
    assert torch.equal(dirty[:, others], clean[:, others])


@pytest.mark.parametrize(("product", "tile", "inner", "tokens", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [1e-2, 50.0])
def test_activations_hold_far_from_one(
    product: Product, tile: Tile, inner: int, tokens: int, dtype: torch.dtype, size: float
) -> None:
    case = project_case(tokens, inner, GROUPS, dtype, size=size)
    got, expected = case.run(product, tile, dtype)[0], case.expected()
    assert got.isfinite().all()
    start = 0
    for group in case.groups:
        span = slice(start, start + group.rows)
        assert distance(got[:, span], expected[:, span]) <= bound(dtype)
        start = span.stop


# ------------------------------------------------------------------------------------------- low-rank products


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(
    ("tokens", "hidden", "ranks", "tile"),
    [
        (3, 64, (64, 64, 64, 64), Tile(16, 32, 64)),
        (17, 192, (64, 128, 64, 192), Tile(64, 128, 64)),
        (17, 192, (0, 64, 64, 128), Tile(64, 64, 64)),
        *(
            pytest.param(tokens, hidden, (64, 128, 64, 320), tile, marks=pytest.mark.gpu)
            for tokens in (1, 17, 64, 130)
            for hidden in (192, 768, 2560)
            for tile in (Tile(16, 32, 64), Tile(64, 64, 64), Tile(64, 128, 64))
        ),
    ],
)
def test_four_low_rank_products_equal_the_reference(
    tokens: int, hidden: int, ranks: tuple[int, ...], tile: Tile, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    own = torch.randn(tokens, sum(ranks), generator=generator).to(dtype)
    weight = (torch.randn(hidden, sum(ranks), generator=generator) * 0.1).to(dtype)
    around = torch.full((tokens + 3, sum(ranks) + 64), torch.nan, dtype=dtype, device=DEVICE)
    x = around[:tokens, : sum(ranks)].copy_(own)
    space = torch.full((5, tokens, hidden), SENTINEL, dtype=dtype, device=DEVICE)
    ends = (ranks[0], ranks[0] + ranks[1], ranks[0] + ranks[1] + ranks[2])
    gpu.up(x, weight.to(DEVICE), ends, space[:4], tile)
    expected = ref.up(own.double(), weight.double(), ranks)
    for got, wanted, (start, end) in zip(space, expected, pairwise((0, *ends, sum(ranks))), strict=False):
        assert distance(got, wanted) <= bound(dtype) if start < end else not got.any()
    assert (space[4] == SENTINEL).all()


def test_a_rank_that_is_no_multiple_of_a_granule_is_refused() -> None:
    x, weight, out = torch.zeros(1, 200), torch.zeros(64, 200), torch.zeros(4, 1, 64)
    with pytest.raises(AssertionError):
        gpu.up(x, weight, (64, 100, 164), out, Tile(16, 32, 64))
