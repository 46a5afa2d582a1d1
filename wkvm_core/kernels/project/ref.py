"""The products as written."""

from __future__ import annotations

import torch

from wkvm_core.kernels.project.groups import Act, Group


def activated(y: torch.Tensor, act: Act) -> torch.Tensor:
    """The activation of a group's outputs."""
    if act is Act.TANH:
        return y.tanh()
    if act is Act.SIGMOID:
        return y.sigmoid()
    return y.relu().square() if act is Act.RELU2 else y


def grouped(x: torch.Tensor, weight: torch.Tensor, groups: tuple[Group, ...]) -> torch.Tensor:
    """x: `[P, T, K]`, weight: `[N, K]`; each group of N rows takes one plane of x: `[T, N]`."""
    outs, start = [], 0
    for group in groups:
        outs.append(activated(x[group.plane] @ weight[start : start + group.rows].t(), group.act))
        start += group.rows
    return torch.cat(outs, 1)


def up(x: torch.Tensor, weight: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
    """x: `[T, sum R]`, weight: `[C, sum R]`: per rank one product, `[G, T, C]`."""
    ends = [sum(ranks[: number + 1]) for number in range(len(ranks))]
    spans = [slice(end - rank, end) for rank, end in zip(ranks, ends, strict=True)]
    return torch.stack([x[:, span] @ weight[:, span].t() for span in spans])
