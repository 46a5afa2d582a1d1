"""WKV-7 on the CPU: one batched step for decodes, a chunked scan for longer rows, and a fixed-shape sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

CHUNK: Final = 32
"""Tokens per chunk of the scan. w > 0.545 keeps the products of 1/w of a chunk below 3e8, so float32 holds them."""


class Wkv7:
    """Rows of one token take one batched step; longer rows the chunked scan."""

    def __init__(self, planes: torch.Tensor, offsets: Sequence[int], read: torch.Tensor, write: torch.Tensor) -> None:
        lengths = [end - start for start, end in pairwise(offsets)]
        single = [row for row, length in enumerate(lengths) if length == 1]
        longer = [row for row, length in enumerate(lengths) if length > 1]
        self._planes = planes
        self._step: Step | None = None
        self._scan: Scan | None = None
        self._singles: torch.Tensor | None = None
        if longer:
            self._scan = Scan(planes, [(offsets[row], lengths[row]) for row in longer], read[longer], write[longer])
        if single and longer:
            self._singles = torch.tensor([offsets[row] for row in single])
            self._gathered = planes.index_select(1, self._singles)
            self._step = Step(self._gathered, read[single], write[single])
        elif single:
            self._step = Step(planes, read, write)

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        if self._scan is None:
            assert self._step is not None
            return self._step(state)
        out = self._scan(state)
        if self._step is not None and self._singles is not None:
            torch.index_select(self._planes, 1, self._singles, out=self._gathered)
            out.index_copy_(0, self._singles, self._step(state))
        return out


class Step:
    """One token for each row, row i being token i."""

    def __init__(self, planes: torch.Tensor, read: torch.Tensor, write: torch.Tensor) -> None:
        rows, heads = planes.shape[1:3]
        self._read, self._write = read, write
        self._one = (int(read[0]), int(write[0])) if rows == 1 else None
        self._matrices = torch.empty((0 if rows == 1 else rows, heads, 64, 64))
        self._flat = self._matrices.view(-1, 64, 64)
        self._advance = Advance(planes.view(7, rows * heads, 64))
        self._out = self._advance.out.view(rows, heads, 64)

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        if self._one is not None:
            read, write = self._one
            self._advance(state[read], state[write])
        else:
            torch.index_select(state, 0, self._read, out=self._matrices)
            self._advance(self._flat, self._flat)
            state.index_copy_(0, self._write, self._matrices)
        return self._out


class Advance:
    """One token on n matrices at once, bound to its planes `[7, n, 64]`."""

    def __init__(self, planes: torch.Tensor) -> None:
        self._r, self._w, self._a, self._removed = (planes[plane].unsqueeze(1) for plane in (0, 3, 4, 6))
        # k and b, v and S a lie four planes apart: both rank-one terms are one product of two columns and two rows.
        self._rows = planes[1::4].transpose(0, 1)
        self._columns = planes[2::4].permute(1, 2, 0)
        self.out = torch.empty_like(self._r)
        """y, [n, 1, 64]"""

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source and target: `[n, 64, 64]`, which may be the same."""
        torch.bmm(self._a, source.mT, out=self._removed)
        torch.mul(source, self._w, out=target)
        target.baddbmm_(self._columns, self._rows)
        torch.bmm(self._r, target.mT, out=self.out)


class Scan:
    """Longer rows, cut into chunks; what does not depend on the state is computed for all chunks at once.

    With P_t the product of w up to t inside a chunk, A = a P_{t-1}, B = b / P, K = k / P, R = r P, the corrections
    U = S_{t-1} a_t of a chunk that starts from S solve the unit triangular system (I - AB) U = A S^T + AK V, so each
    chunk maps S to S F + E and y to G S^T + Y with F, E, G, Y free of S: one product a chunk is left in sequence."""

    def __init__(
        self, planes: torch.Tensor, spans: Sequence[tuple[int, int]], read: torch.Tensor, write: torch.Tensor
    ) -> None:
        """spans: first token and number of tokens of each row."""
        self._planes = planes
        order = sorted(range(len(spans)), key=lambda row: -spans[row][1])
        self._read, self._write = read[order], write[order]
        chunks = [-(-spans[row][1] // CHUNK) for row in order]
        self._waves = [sum(1 for n in chunks if n > wave) for wave in range(chunks[0])]
        """Rows that still have a chunk, by chunk number; always the first ones of `order`."""
        places: list[int] = []
        for wave, active in enumerate(self._waves):
            for row in order[:active]:
                start, length = spans[row]
                taken = min(CHUNK, length - wave * CHUNK)
                first = start + wave * CHUNK
                places += [*range(first, first + taken), *([-1] * (CHUNK - taken))]
        index = torch.tensor(places)
        self._padded = index < 0
        self._source = index.clamp(min=0)
        self._target = index[~self._padded]
        self._real = (~self._padded).nonzero()[:, 0]
        self._any_padding = bool(self._padded.any())

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """y of the rows' tokens; other tokens' y is left undefined."""
        planes = self._planes
        heads = planes.shape[2]
        count = self._source.shape[0] // CHUNK
        chosen = planes[:6].index_select(1, self._source)
        if self._any_padding:
            chosen.masked_fill_(self._padded[None, :, None, None], 0.0)
            chosen[3].masked_fill_(self._padded[:, None, None], 1.0)
        chunked = chosen.view(6, count, CHUNK, heads, 64).transpose(2, 3).contiguous().view(6, count * heads, CHUNK, 64)
        r, k, v, w, a, b = chunked.unbind()
        decay = torch.cumprod(w, dim=1)
        total = decay[:, -1:]
        before = torch.ones_like(decay)
        before[:, 1:] = decay[:, :-1]
        left = torch.cat((a * before, r * decay), dim=1)
        b, k = b / decay, k / decay
        products = torch.bmm(left, torch.cat((b, k), dim=1).mT)
        to_b, to_k = products[:, :, :CHUNK], products[:, :, CHUNK:]
        system = to_b[:, :CHUNK].tril(-1).neg_()
        seen = torch.cat((left[:, :CHUNK], torch.bmm(to_k[:, :CHUNK].tril(-1), v)), dim=2)
        solved = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
        answer = torch.bmm(to_b[:, CHUNK:].tril(), solved)
        through = answer[:, :, :64].add_(left[:, CHUNK:])
        local = answer[:, :, 64:].baddbmm_(to_k[:, CHUNK:].tril(), v)
        b.mul_(total)
        k.mul_(total)
        carry = torch.bmm(solved[:, :, :64].mT, b)
        carry.diagonal(dim1=1, dim2=2).add_(total[:, 0])
        added = torch.bmm(solved[:, :, 64:].mT, b).baddbmm_(v.mT, k)

        starts = torch.empty_like(added)
        matrices = state.index_select(0, self._read).view(-1, 64, 64)
        first = 0
        for active in self._waves:
            here = slice(first, first + active * heads)
            first = here.stop
            starts[here] = matrices[: active * heads]
            matrices[: active * heads] = torch.baddbmm(added[here], starts[here], carry[here])
        state.index_copy_(0, self._write, matrices.view(-1, heads, 64, 64))
        y = local.baddbmm(through, starts.mT).view(count, heads, CHUNK, 64).transpose(1, 2).reshape(-1, heads, 64)
        out = torch.empty_like(planes[0])
        return out.index_copy_(0, self._target, y.index_select(0, self._real) if self._any_padding else y)


class SequentialWkv7:
    """Token after token, row after row, each step of one shape: a token's bits depend on nothing but its own inputs."""

    def __init__(self, planes: torch.Tensor, offsets: Sequence[int], read: torch.Tensor, write: torch.Tensor) -> None:
        self._rows = list(zip(offsets[:-1], offsets[1:], read.tolist(), write.tolist(), strict=True))
        self._steps = [Advance(planes[:, token]) for token in range(offsets[-1])]
        self._out = torch.zeros_like(planes[0])

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        for start, end, read, write in self._rows:
            source, target = state[read], state[write]
            for token in range(start, end):
                step = self._steps[token]
                step(source, target)
                self._out[token] = step.out[:, 0]
                source = target
        return self._out
