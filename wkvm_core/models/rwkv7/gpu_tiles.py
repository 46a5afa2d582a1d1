"""How the products of RWKV-7 on a GPU are cut, by the number of tokens; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from wkvm_core.kernels.project.gpu import Tile

FEW: Final = 8
"""Tokens of a launch up to which products in CUDA C++ are faster, in models narrower than `WIDE`."""
FUSED: Final = 128
"""Tokens of a launch up to which our own products are faster than cuBLAS's: half as many from `WIDE` on."""
WIDE: Final = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the products of one launch are cut."""

    into: Tile
    up: Tile
    output: Tile
    ffn_key: Tile
    ffn_value: Tile
    head: Tile


def fused(hidden: int) -> int:
    """Tokens up to which all products are our own, in a model of that width."""
    return FUSED if hidden < WIDE else FUSED // 2


def tiles_for(tokens: int, hidden: int, ffn: int, *, has_few: bool, one_for_all: bool) -> Tiles:
    """has_few: there are products in CUDA C++; one_for_all: the same tiles for every number of tokens."""
    split_c = _split(hidden, hidden)
    split_f = _split(hidden, ffn)
    is_wide = hidden >= WIDE
    if tokens <= FEW and has_few and not is_wide:
        plain = Tile(16, 64, 256, 1, 4, 4, few=True)
        return Tiles(
            into=plain,
            up=Tile(16, 32, 64, 1, 4, 4),
            output=replace(plain, split=1 if tokens <= 2 or hidden > 2048 else 2),
            ffn_key=plain,
            ffn_value=replace(plain, split=2),
            head=plain,
        )
    if tokens <= 16 and not one_for_all:
        return Tiles(
            into=Tile(16, 64, 256, 1, 8, 4),
            up=Tile(16, 64 if is_wide else 32, 64, 1, 4, 4),
            output=Tile(16, 64, 256, split_c, 4, 4),
            ffn_key=Tile(16, 32, 512, 1, 4, 2) if is_wide else Tile(16, 64, 256, 1, 4, 4),
            ffn_value=Tile(16, 64, 256, split_f, 4, 4),
            head=Tile(16, 64, 128, 1, 4, 5),
        )
    if tokens <= 64 or one_for_all:
        many = Tile(64, 64, 128, 1, 4, 3 if is_wide else 5)
        return Tiles(
            into=many,
            up=Tile(64, 64, 64, 1, 4, 4),
            output=Tile(64, 64, 128, split_c, 4, 5),
            ffn_key=many,
            ffn_value=Tile(64, 64, 128, split_f, 4, 4 if is_wide else 5),
            head=Tile(64, 64, 64, 1, 4, 5),
        )
    wide = Tile(128, 256, 64, 1, 8, 3) if tokens >= 512 else Tile(128, 128, 64, 1, 8, 4)
    return Tiles(
        into=Tile(64, 64, 64, 1, 4, 5)
        if tokens <= fused(hidden)
        else Tile(64, 32, 128, 1, 4, 5)
        if tokens <= 512
        else Tile(128, 64, 128, 1, 8, 3),
        up=Tile(64, 128, 64, 1, 4, 4) if tokens < 512 else Tile(128, 128, 64, 1, 8, 3),
        output=Tile(64, 64, 128, max(split_c // 2, 1), 4, 5),
        ffn_key=Tile(128, 64, 64, 1, 4, 5) if tokens <= fused(hidden) else wide,
        ffn_value=Tile(128, 64, 64, split_f, 4, 5),
        head=Tile(64, 64, 64, 1, 4, 5),
    )


def _split(columns: int, inner: int) -> int:
    """Parts of the inner axis, so that about as many programs run as an H100 or H200 has multiprocessors (132)."""
    split = 1
    while columns // 64 * split * 2 <= 132 and inner % (split * 2 * 128) == 0:
        split *= 2
    return split
