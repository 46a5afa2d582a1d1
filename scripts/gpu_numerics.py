"""How far a model on a GPU is from float64 on the same weights: by dtypes, by number of tokens, and by how the same
tokens were cut into launches. Writes a JSON file and prints tables for docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.nn import functional

from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.graphs import CudaGraphs
from wkvm_core.models.protocol import Batch
from wkvm_core.models.rwkv7.drawn import random_tensors, shape_of
from wkvm_core.models.rwkv7.gpu import GpuRwkv7, InvariantGpuRwkv7
from wkvm_core.models.rwkv7.names import HEAD_SIZE, Sizes, canonical_tensors

Tensors = Mapping[str, torch.Tensor]
NUMERICS = (
    ("float32", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
)
ROWS = 8
"""Sequences side by side."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_numerics.py", description=__doc__)
    parser.add_argument("--model", default="random:0.4b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 4096], help="of a sequence, ascending")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device("cuda")
    with torch.inference_mode():
        # In bfloat16, as checkpoints are: every compute dtype holds such weights (float16 all but the tiniest).
        drawn = random_tensors(shape_of(given.model), device, torch.bfloat16)
        tensors, sizes = canonical_tensors(drawn, {})
        most = max(given.tokens)
        ids = torch.randint(1, sizes.vocab, (ROWS, most + 1), generator=torch.Generator().manual_seed(6)).to(device)
        exact = Exact(tensors, sizes, ids)
        results = list(by_dtype(exact, given.tokens)) + list(by_cut(exact))
    given.json.write_text(json.dumps({"model": given.model, "results": results}, indent=1) + "\n")


class Exact:
    """The forward pass in float64, and what it says of the sequences: log-probabilities of each next id `[rows, T]`,
    and the wkv states `[rows, layers, heads, 64, 64]` after the token counts that were asked for."""

    def __init__(self, tensors: Tensors, sizes: Sizes, ids: torch.Tensor) -> None:
        self.tensors, self.sizes, self.ids = tensors, sizes, ids
        self.counts = (1, 128, ids.shape[1] - 1)
        self.states: dict[int, list[torch.Tensor]] = {count: [] for count in self.counts}
        x = self._norm("blocks.0.ln0", self._wide("emb.weight")[ids[:, :-1]])
        first: torch.Tensor | None = None
        for number in range(sizes.layers):
            y, first = self._time_mix(f"blocks.{number}.", self._norm(f"blocks.{number}.ln1", x), first)
            x = x + y
            x = x + self._channel_mix(f"blocks.{number}.ffn.", self._norm(f"blocks.{number}.ln2", x))
        x = self._norm("ln_out", x)
        head = self._wide("head.weight").t()
        self.logprobs = torch.stack([logprobs_of(part @ head, nxt) for part, nxt in zip(x, ids[:, 1:], strict=True)])

    def state(self, count: int) -> torch.Tensor:
        return torch.stack(self.states[count], 1)

    def _wide(self, name: str) -> torch.Tensor:
        return self.tensors[name].double()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._wide(f"{name}.weight"), self._wide(f"{name}.bias"))

    def _time_mix(self, block: str, u: torch.Tensor, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        att = f"{block}att."
        d = shifted(u) - u

        def mixed(name: str) -> torch.Tensor:
            return u + d * self._wide(f"{att}x_{name}").flatten()

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ self._wide(f"{att}{name}.weight").t()

        def low(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ self._wide(f"{att}{name}1"), self._wide(f"{att}{name}2")

        def vector(name: str) -> torch.Tensor:
            return self._wide(att + name).flatten()

        r, k, v = (linear(n, mixed(n[0])) for n in ("receptance", "key", "value"))
        inner, outer = low("w", mixed("w"))
        w = torch.exp(-0.6065306597126334 * torch.sigmoid(vector("w0") + inner.tanh() @ outer))
        inner, outer = low("a", mixed("a"))
        a = torch.sigmoid(vector("a0") + inner @ outer)
        inner, outer = low("g", mixed("g"))
        gate = inner.sigmoid() @ outer
        if first is None:
            first = v
        else:
            inner, outer = low("v", mixed("v"))
            v = v + (first - v) * torch.sigmoid(vector("v0") + inner @ outer)
        shape = (*u.shape[:2], -1, HEAD_SIZE)
        kk = functional.normalize((k * vector("k_k")).view(shape), dim=-1)
        k = k * (1 + (a - 1) * vector("k_a"))
        y = self._recurrence(*(x.reshape(shape) for x in (r, w, k, v)), kk, kk * a.view(shape))
        normed = functional.group_norm(
            y.reshape(-1, u.shape[2]), shape_heads(u), vector("ln_x.weight"), vector("ln_x.bias"), HEAD_SIZE * 1e-5
        ).view(u.shape)
        bonus = (r * k * vector("r_k")).view(shape).sum(-1, keepdim=True) * v.view(shape)
        return linear("output", (normed + bonus.view(u.shape)) * gate), first

    def _recurrence(
        self, r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kk: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        rows, tokens, heads = r.shape[:3]
        state = torch.zeros(rows, heads, HEAD_SIZE, HEAD_SIZE, dtype=torch.float64, device=r.device)
        y = torch.empty_like(r)
        for t in range(tokens):
            removed = state @ -kk[:, t, :, :, None]
            state = state * w[:, t, :, None] + removed * b[:, t, :, None] + v[:, t, :, :, None] * k[:, t, :, None]
            y[:, t] = (state @ r[:, t, :, :, None]).squeeze(-1)
            if t + 1 in self.states:
                self.states[t + 1].append(state.clone())
        return y

    def _channel_mix(self, ffn: str, u: torch.Tensor) -> torch.Tensor:
        mixed = u + (shifted(u) - u) * self._wide(f"{ffn}x_k").flatten()
        hidden = (mixed @ self._wide(f"{ffn}key.weight").t()).relu() ** 2
        return hidden @ self._wide(f"{ffn}value.weight").t()


def shifted(u: torch.Tensor) -> torch.Tensor:
    return functional.pad(u, (0, 0, 1, 0))[:, :-1]


def shape_heads(u: torch.Tensor) -> int:
    return u.shape[2] // HEAD_SIZE


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of one id a row: float64 `[rows]`."""
    return logits.double().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


class Runs:
    """The same sequences through a model of the engine, from empty states."""

    def __init__(self, exact: Exact, compute: str, state: str, family: type[GpuRwkv7] = GpuRwkv7) -> None:
        self.exact, self.ids = exact, exact.ids
        self.device = self.ids.device
        self.model = family(
            "x",
            exact.tensors,
            exact.sizes,
            fingerprint="",
            eos_ids=(0,),
            compute_dtype=compute,
            state_dtype=state,
            device=self.device,
        )
        self.bank = StateBank(self.model.layout, 64, self.device)

    def decoded(self, rows: int, bucket: int, counts: list[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Token by token in a captured step of `bucket` rows, of which the last are padding: log-probabilities, and the
        states after so many tokens."""
        self.model.reserve(bucket, bucket)
        tokens = torch.zeros(bucket, dtype=torch.int64, device=self.device)
        slots = torch.arange(2, 2 + bucket, device=self.device)
        read, write = slots.clone(), slots.clone()
        read[rows:], write[rows:] = 0, 1
        batch = Batch(tokens, tuple(range(bucket + 1)), read, write, torch.arange(bucket, device=self.device))
        found: list[torch.Tensor] = []

        def work() -> None:
            found[:] = [self.model.forward(batch, self.bank.families)]

        step = CudaGraphs(self.device)(work)
        self.bank.bytes.zero_()
        told, states = [], {}
        for t in range(self.ids.shape[1] - 1):
            tokens[:rows].copy_(self.ids[:rows, t])
            step()
            told.append(logprobs_of(found[0][:rows], self.ids[:rows, t + 1]))
            if t + 1 in counts:
                states[t + 1] = self._states(rows)
        return torch.stack(told, 1), states

    def read(self, rows: int, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches that end at each cut: log-probabilities and the states at the end."""
        widest = max(b - a for a, b in zip([0, *cuts[:-1]], cuts, strict=True))
        self.model.reserve(rows * widest, rows * widest)
        self.bank.bytes.zero_()
        told, start = [], 0
        slots = torch.arange(2, 2 + rows, device=self.device)
        for end in cuts:
            count = end - start
            own = self.ids[:rows, start:end].reshape(-1)
            batch = Batch(
                own,
                tuple(range(0, rows * count + 1, count)),
                slots,
                slots,
                torch.arange(rows * count, device=self.device),
                torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=self.device),
                torch.arange(rows, dtype=torch.int32, device=self.device).repeat_interleave(count),
            )
            logits = self.model.forward(batch, self.bank.families)
            told.append(logprobs_of(logits, self.ids[:rows, start + 1 : end + 1].reshape(-1)).view(rows, count))
            start = end
        return torch.cat(told, 1), self._states(rows)

    def _states(self, rows: int) -> torch.Tensor:
        return self.bank.families["wkv"][2 : 2 + rows].double()

    def distance(self, states: torch.Tensor, count: int) -> float:
        """Relative, of all states together."""
        exact = self.exact.state(count)[: len(states)].view(states.shape)
        return float((states - exact).norm() / exact.norm())

    def off(self, told: torch.Tensor) -> dict[str, float]:
        """How far log-probabilities are off, nats."""
        away = (told - self.exact.logprobs[: told.shape[0], : told.shape[1]]).abs().flatten()
        return {"logprob_p50": float(away.quantile(0.5)), "logprob_p999": float(away.quantile(0.999))}


def by_dtype(exact: Exact, counts: list[int]) -> Iterator[dict]:
    print("| products | state | " + " | ".join(f"state after {count}" for count in counts) + " | logprob p50 | p99.9 |")
    print("| --- " * (len(counts) + 4) + "|")
    for compute, state in NUMERICS:
        runs = Runs(exact, compute, state)
        told, states = runs.decoded(ROWS, ROWS, counts)
        result = {"products": compute, "state": state}
        result |= {f"state_{count}": runs.distance(states[count], count) for count in counts} | runs.off(told)
        numbers = [f"{value:.1e}" for value in result.values() if isinstance(value, float)]
        print("| " + " | ".join([compute, state, *numbers]) + " |", flush=True)
        yield result


def by_cut(exact: Exact) -> Iterator[dict]:
    most = exact.ids.shape[1] - 1
    half = most // 2
    print("| products, state | the same tokens | state | logprob p50 | p99.9 |")
    print("| --- | --- | --- | --- | --- |")
    for family, compute, state in (
        (GpuRwkv7, "bfloat16", "float32"),
        (GpuRwkv7, "float16", "float16"),
        (InvariantGpuRwkv7, "bfloat16", "float32"),
    ):
        runs = Runs(exact, compute, state, family)
        ways = {
            "read at once": lambda runs=runs: runs.read(1, [most]),
            "read in two halves (resumed)": lambda runs=runs: runs.read(1, [half, most]),
            "read by 64": lambda runs=runs: runs.read(1, list(range(64, most + 1, 64))),
            "read beside seven others": lambda runs=runs: runs.read(ROWS, [most // 4, half, most]),
            "decoded alone": lambda runs=runs: runs.decoded(1, 1, [most]),
            "decoded in a bucket of 64": lambda runs=runs: runs.decoded(1, 64, [most]),
        }
        for way, run in ways.items():
            told, states = run()
            last = states[most] if isinstance(states, dict) else states
            told, last = told[:1], last[:1]
            result = {"mode": family.__name__, "products": compute, "state": state, "way": way}
            result |= {"distance": runs.distance(last, most)} | runs.off(told)
            mode = " (deterministic)" if family.deterministic else ""
            numbers = " | ".join(f"{result[key]:.2e}" for key in ("distance", "logprob_p50", "logprob_p999"))
            print(f"| {compute}, {state}{mode} | {way} | {numbers} |", flush=True)
            yield result


if __name__ == "__main__":
    main()
