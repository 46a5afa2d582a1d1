"""The sampler: logits and lanes in, tokens and flags out; the lanes move on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wkvm_core.exec.lanes import Lanes
from wkvm_core.kernels.draw import MAX_VOCAB_SIZE, Cut, best, draw_ranked, draw_whole, log_weight, ranked, weights
from wkvm_core.kernels.lane import (
    BAN,
    BIASED,
    BROKEN,
    COUNTED,
    DELAYED,
    DONE,
    FLOORED,
    FREQUENCY,
    HALTS,
    IN_PROMPT,
    KEY,
    LAST,
    LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    NEXT,
    NUM_OUTCOMES,
    PAUSED,
    POSITION,
    PRESENCE,
    RANKED,
    REMAINING,
    REPETITION,
    SAMPLED,
    SHARPNESS,
    STATUS,
    STOPS,
    TOP_P,
    TYPICAL,
    TYPICAL_P,
    WAITING,
)
from wkvm_core.kernels.splitmix import uniform
from wkvm_core.sched.plan import EXHAUSTED, FAULT, HALTED, RAN, STOPPED, RowLogprobs

LOGPROB_FLOOR = -9999.0
"""Lower log-probabilities are given as this one, so that all of them are finite numbers."""
PIECE = 1 << 17
"""Logits of a piece of rows."""
LOOKS = (128, 4096, MAX_VOCAB_SIZE)
"""How many of a row's best are ranked at first, and then, until all that it may keep are among them."""
WIDEST_LOOK = 1024
"""Greatest top-k that the first look is widened for."""
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities in the raw distribution, of the rows that asked, `[asked]` and `[asked, k]` on the device."""

    rows: tuple[int, ...]
    """Which rows, on the host."""
    wanted: tuple[int, ...]
    """How many of the k best each of them asked for."""
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def by_row(self) -> dict[int, RowLogprobs]:
        """The same as values of a step's result; meaningless for a row without a sampled token."""
        chosen, top_ids, top = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        return {
            row: RowLogprobs(chosen[at], tuple(top_ids[at][:wanted]), tuple(top[at][:wanted]))
            for at, (row, wanted) in enumerate(zip(self.rows, self.wanted, strict=True))
        }


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call brought: `packed` is int64 `[2, rows]`, tokens and flags, so that the host reads one tensor."""

    packed: torch.Tensor
    logprobs: Logprobs | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [rows]: the sampled id, or -1."""
        return self.packed[0]

    @property
    def flags(self) -> torch.Tensor:
        """int64 [rows], in the words of the plan: 0 for a lane that was halted or done, FAULT alone for logits that
        are not finite, otherwise RAN with STOPPED, EXHAUSTED and HALTED as they apply."""
        return self.packed[1]


class Sampler:
    """Samples one token a row and moves the lanes on. A row's result does not depend, bit by bit, on batch size, row
    number, lane number, or what its neighbours are and ask for.

    Logits that are not finite (NaN or +inf anywhere, or -inf alone) end their lane and no other. When every id of a
    row is banned (by bias, as a stop id before min_tokens, or by a logit of -inf), the bans are lifted for that draw
    and the biased logits decide.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        # NumPy's operators cost half of torch's on a few numbers, so on the CPU the lanes move on through its views.
        view = torch.Tensor.numpy if lanes.device.type == "cpu" else torch.Tensor.detach
        self._view: Callable[[torch.Tensor], Any] = view
        self._numbers = view(lanes.numbers)
        self._marks = view(lanes.marks.view(-1))
        self._outcomes = view(outcomes().to(lanes.device))

    def sample(self, logits: torch.Tensor, lanes: torch.Tensor, pause: torch.Tensor) -> Sampled:
        """logits: float32 [rows, vocab], not changed; lanes: int64 [rows], each lane at most once (`idle` apart);
        pause: bool [rows], halt after this token. All on the lanes' device."""
        needs = self.lanes.needs(lanes)
        packed, tokens, values = self._sample(logits, lanes, pause, needs)
        if not int(np.bitwise_or.reduce(needs)) & LOGPROBS:
            return Sampled(packed)
        rows = self._rows(needs, LOGPROBS)
        logprobs = self.logprobs(
            _of(logits, rows), _of(tokens, rows), _of(values, rows), self.lanes.num_logprobs(_of(lanes, rows))
        )
        return Sampled(packed, logprobs if rows is None else replace(logprobs, rows=tuple(rows.tolist())))

    def draw(self, logits: torch.Tensor, lanes: torch.Tensor, pause: torch.Tensor) -> torch.Tensor:
        """`sample` without log-probabilities: tokens and flags, int64 [2, rows]."""
        return self._sample(logits, lanes, pause, self.lanes.needs(lanes))[0]

    def _sample(
        self, logits: torch.Tensor, lanes: torch.Tensor, pause: torch.Tensor, needs: npt.NDArray[np.uint8]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens and flags; the ids drawn, whatever became of them; the best raw logits."""
        asked = int(np.bitwise_or.reduce(needs))
        values, tokens = best(logits)
        if asked & ~LOGPROBS:
            chosen = self._rows(needs, ~LOGPROBS)
            drawn = self._draw(_of(logits, chosen), _of(lanes, chosen), _of(values, chosen))
            tokens = drawn if chosen is None else tokens.index_copy(0, chosen.to(tokens.device), drawn)
        view = self._view
        packed = torch.as_tensor(self._settle(view(tokens), view(values), view(lanes), view(pause)))
        if asked & COUNTED:
            self._count(packed[0], lanes, needs)
        return packed, tokens, values

    @staticmethod
    def _rows(needs: npt.NDArray[np.uint8], bits: int) -> torch.Tensor | None:
        """Rows that need any of the bits; None = all of them."""
        which = (needs & np.uint8(bits & 0xFF)) != 0
        return None if which.all() else torch.from_numpy(which.nonzero()[0])

    def _settle(self, tokens: Any, values: Any, lanes: Any, pause: Any) -> Any:
        """Computes the flags and moves the lanes on: int64 [2, rows]. Tensors or arrays: operators only."""
        rows = self._numbers[lanes]
        code = (self._marks[rows[:, STOPS] + tokens] | self._marks[rows[:, HALTS] + tokens]) + rows[:, STATUS]
        code += (rows[:, REMAINING] <= 1) * LAST + pause * PAUSED + ~(abs(values) <= _LARGEST) * BROKEN
        outcome = self._outcomes[code]
        rows[:, NEXT] += (tokens - rows[:, NEXT]) * outcome[:, 2]
        rows[:, POSITION : STATUS + 1] += outcome[:, 2:]
        self._numbers[lanes] = rows
        outcome[:, 0] |= tokens
        return outcome[:, :2].T

    def _count(self, tokens: torch.Tensor, lanes: torch.Tensor, needs: npt.NDArray[np.uint8]) -> None:
        rows = self._rows(needs, COUNTED)
        tokens, lanes = _of(tokens, rows), _of(lanes, rows)
        places = lanes * self.lanes.vocab_size + tokens.clamp(min=0)
        self.lanes.counts.view(-1).index_add_(0, places, (tokens >= 0).to(torch.int32))

    # ---------------------------------------------------------------------------------------------- drawing

    def _draw(self, logits: torch.Tensor, lanes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Tokens of rows that are not plainly greedy: int64 [rows]. Rows that are not finite get some id.

        values: each row's best. Rows go through in pieces that stay in the processor's cache.
        """
        piece = max(1, PIECE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        if len(logits) <= piece:
            return self._draw_piece(logits, lanes, values)
        parts = zip(*(torch.split(table, piece) for table in (logits, lanes, values)), strict=True)
        return torch.cat([self._draw_piece(*part) for part in parts])

    def _draw_piece(self, logits: torch.Tensor, lanes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        needs = self.lanes.needs(lanes)
        asked = int(np.bitwise_or.reduce(needs))
        numbers = self.lanes.numbers.index_select(0, lanes)
        knobs = self.lanes.knobs.index_select(0, lanes)
        x, values = _sound(logits, values)
        if asked & (COUNTED | BIASED | DELAYED):
            x = self._shape(x, lanes, numbers, knobs, asked)
            values, _ = best(x)
        tokens = best(x)[1]
        if not asked & SAMPLED:
            return tokens
        uniforms = uniform(numbers[:, KEY], numbers[:, POSITION])
        for bits, draw in ((SAMPLED, self._draw_whole), (SAMPLED | RANKED, self._draw_ranked)):
            which = (needs & (SAMPLED | RANKED)) == bits
            if which.any():
                rows = None if which.all() else torch.from_numpy(which.nonzero()[0])
                own = _of(knobs, rows)
                below = _of(x, rows) - _of(values, rows)[:, None]
                below *= own[:, SHARPNESS, None].to(torch.float32)
                drawn = draw(below, _of(lanes, rows), own, _of(uniforms, rows))
                tokens = drawn if rows is None else tokens.index_copy(0, rows.to(tokens.device), drawn)
        return tokens

    def _draw_whole(
        self, x: torch.Tensor, lanes: torch.Tensor, knobs: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        floored = bool((self.lanes.needs(lanes) & FLOORED).any())
        return draw_whole(x, knobs[:, MIN_P] if floored else None, uniforms)

    def _draw_ranked(
        self, x: torch.Tensor, lanes: torch.Tensor, knobs: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """Looks at the best few first, and at whole rows only where those did not settle the matter."""
        top_k = self.lanes.top_k(lanes)
        needs = self.lanes.needs(lanes)
        cut = Cut(torch.from_numpy(top_k).to(x.device), knobs[:, TOP_P], knobs[:, TYPICAL_P], knobs[:, MIN_P])
        vocab_size = x.shape[1]
        unbounded = bool((top_k == 0).any())
        total = weights(x).sum(1) if unbounded else torch.zeros_like(lanes)
        typical = bool((needs & TYPICAL).any())
        tokens = torch.empty_like(lanes)
        open_rows = torch.arange(len(x), device=x.device)
        for look in LOOKS:
            count = max(LOOKS[0] * unbounded, int(top_k[top_k <= WIDEST_LOOK].max(initial=1)))
            count = min(vocab_size, count if look == LOOKS[0] else look)
            drawn, enough = draw_ranked(x, total, cut, uniforms, count, typical=typical)
            tokens[open_rows] = drawn
            rest = (~enough).nonzero().squeeze(1)
            if not len(rest):
                break
            open_rows, x, total, cut, uniforms = open_rows[rest], x[rest], total[rest], cut.rows(rest), uniforms[rest]
        return tokens

    def _shape(
        self, x: torch.Tensor, lanes: torch.Tensor, numbers: torch.Tensor, knobs: torch.Tensor, asked: int
    ) -> torch.Tensor:
        """Penalties, bias and bans; float32 [rows, vocab], at least one finite value a row."""
        gone = x == -torch.inf
        if asked & COUNTED:
            counts = self.lanes.counts.index_select(0, lanes)
            own = knobs.to(torch.float32)[:, :, None]
            again = own[:, REPETITION]
            x = torch.where(counts != 0, torch.where(x > 0, x / again, x * again), x)
            generated = counts & (IN_PROMPT - 1)
            x = x - (own[:, PRESENCE] * (generated > 0) + own[:, FREQUENCY] * generated)
        banned = gone
        if asked & BIASED:
            bias = self.lanes.bias.index_select(0, lanes)
            x = x + bias
            banned = banned | (bias <= BAN)
        if asked & DELAYED:
            early = numbers[:, POSITION] < numbers[:, MIN_TOKENS]
            stops = self.lanes.marks.view(-1, x.shape[1]).index_select(0, numbers[:, STOPS] // x.shape[1])
            banned = banned | ((stops != 0) & early[:, None])
        x = x.clamp(-_LARGEST, _LARGEST)  # a penalty may leave float32
        lifted = banned.all(1, keepdim=True)
        return x.masked_fill(torch.where(lifted, gone, banned), -torch.inf)

    # ---------------------------------------------------------------------------------------------- logprobs

    @staticmethod
    def logprobs(
        logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, wanted: npt.NDArray[np.int64]
    ) -> Logprobs:
        """Of rows that all ask: logits float32 [rows, vocab]; tokens: int64 [rows], ids; values: float32 [rows], each
        row's best logit; wanted: int64 [rows], at least 0."""
        x, values = _sound(logits, values)
        x = x - values[:, None]
        norm = log_weight(weights(x).sum(1))[:, None]
        ids = torch.cat((tokens[:, None], ranked(x, min(int(wanted.max()), x.shape[1]))), 1)
        all_of_them = (x.gather(1, ids).to(torch.float64) - norm).clamp_(min=LOGPROB_FLOOR).to(torch.float32)
        return Logprobs(
            rows=tuple(range(len(wanted))),
            wanted=tuple(wanted.tolist()),
            chosen=all_of_them[:, 0],
            top_ids=ids[:, 1:],
            top=all_of_them[:, 1:],
        )


def _sound(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and best values with zeros in rows that are not finite."""
    broken = ~values.isfinite()
    if logits.device.type == "cpu" and not broken.any():
        return logits, values
    return logits.masked_fill(broken[:, None], 0.0), values.masked_fill(broken, 0.0)


def outcomes() -> torch.Tensor:
    """int64 [codes, 5]: what to or into the token (-1 = none sampled), flags, and what to add to POSITION, REMAINING
    and STATUS, of each code: a row's marks (STOPPED, HALTED), LAST, PAUSED, BROKEN, and its lane's STATUS."""
    table = torch.zeros(DONE + WAITING, NUM_OUTCOMES, dtype=torch.int64)
    table[:, 0] = -1
    for code in range(WAITING):  # those of active lanes; all others change nothing
        if code & BROKEN:
            table[code] = torch.tensor([-1, FAULT, 0, 0, DONE])
            continue
        flags = RAN | code & (STOPPED | HALTED)
        flags |= EXHAUSTED * bool(code & LAST) | HALTED * bool(code & PAUSED)
        status = DONE if flags & (STOPPED | EXHAUSTED) else WAITING * bool(flags & HALTED)
        table[code] = torch.tensor([0, flags, 1, -1, status])
    return table


def _of(table: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Some rows of a table; None = all."""
    return table if rows is None else table.index_select(0, rows.to(table.device))
