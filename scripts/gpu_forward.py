"""The forward pass by itself on a GPU: held against float32 on the CPU, or timed and taken apart by kernels."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from wkvm_core.exec.bank import StateBank
from wkvm_core.models.open import open_model
from wkvm_core.models.protocol import Batch, Model
from wkvm_core.models.rwkv7.drawn import random_tensors
from wkvm_core.models.rwkv7.shapes import Shape

CHECKED = Shape(4, 256, (32, 32, 16, 48), vocab=1024)
LENGTHS = (1, 17, 130)
DECODED = 24
WORST = 0.03
"""Relative error of logits and states allowed to bfloat16, which costs about 0.005 of it on a CPU (0.008 with such a
state)."""
REPLAYS = 50
PROFILED = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_forward.py", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", default="random:1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", help="of the weights")
    parser.add_argument("--state-dtype", default="float16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    with torch.inference_mode():
        results = check(given) if given.check else list(timed(given))
    given.json.write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        print({key: value for key, value in result.items() if key != "kernels"}, flush=True)
    if given.check and any(max(result["logits"], *result["states"].values()) > WORST for result in results):
        sys.exit(f"farther than {WORST} from float32 on the CPU")


def check(given: argparse.Namespace) -> list[dict]:
    """Ragged prompts at once, then tokens one by one; the same checkpoint on both devices."""
    with tempfile.TemporaryDirectory(prefix="wkvm-") as folder:
        path = Path(folder) / "model.safetensors"
        save_file(random_tensors(CHECKED, torch.device("cpu"), torch.bfloat16), path)
        logits, states = story(open_model(path), torch.device("cpu"))
        model = open_model(path, compute_dtype=given.dtype, state_dtype=given.state_dtype, device=given.device)
        own_logits, own_states = story(model, torch.device(given.device))
    apart = {name: distance(own_states[name], state) for name, state in states.items()}
    return [
        {
            "dtype": given.dtype,
            "state_dtype": given.state_dtype,
            "logits": distance(own_logits, logits),
            "states": apart,
        }
    ]


def story(model: Model, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of every step, and the states at the end, on the CPU."""
    generator = torch.Generator().manual_seed(3)
    rows, slots = len(LENGTHS), range(2, 2 + len(LENGTHS))
    model.reserve(sum(LENGTHS), sum(LENGTHS))
    bank = StateBank(model.layout, rows, device)
    prompt = torch.randint(0, model.vocab_size, (sum(LENGTHS),), generator=generator)
    kept = [model.forward(batch(prompt, LENGTHS, [0] * rows, slots, device), bank.families).cpu()]
    for _ in range(DECODED):
        tokens = torch.randint(0, model.vocab_size, (rows,), generator=generator)
        kept.append(model.forward(batch(tokens, (1,) * rows, slots, slots, device), bank.families).cpu())
    return torch.cat(kept), {name: view[2:].float().cpu() for name, view in bank.families.items()}


def batch(
    tokens: torch.Tensor, lengths: Sequence[int], read: Sequence[int], write: Sequence[int], device: torch.device
) -> Batch:
    """A launch that wants the logits after each row's last token."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    bounds = torch.tensor(offsets, dtype=torch.int32)
    row_of = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    ragged = device.type != "cpu" and len(lengths) != len(tokens)
    return Batch(
        tokens=tokens.to(device),
        offsets=tuple(offsets),
        read=torch.tensor(list(read), device=device),
        write=torch.tensor(list(write), device=device),
        wanted=torch.tensor([end - 1 for end in offsets[1:]], device=device),
        bounds=bounds.to(device) if ragged else None,
        row_of=row_of.to(device) if ragged else None,
    )


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def timed(given: argparse.Namespace) -> Iterator[dict]:
    """One decode step of the model as a CUDA graph, for each number of rows: median of its time, and where it goes."""
    model = open_model(given.model, compute_dtype=given.dtype, state_dtype=given.state_dtype, device=given.device)
    device = torch.device(given.device)
    most = max(given.rows)
    model.reserve(most, most)
    bank = StateBank(model.layout, most, device)
    for view in bank.families.values():
        view[2:].normal_()
    for rows in given.rows:
        tokens = torch.randint(0, model.vocab_size, (rows,), generator=torch.Generator().manual_seed(4))
        slots = range(2, 2 + rows)
        step = batch(tokens, (1,) * rows, slots, slots, device)
        times, kernels = replayed(lambda step=step: model.forward(step, bank.families))
        yield {
            "model": given.model,
            "state_dtype": given.state_dtype,
            "rows": rows,
            "step_us": statistics.median(times),
            "tokens_per_s": 1e6 * rows / statistics.median(times),
            "launches": sum(kernel["launches"] for kernel in kernels),
            "kernels": kernels,
        }


def replayed(call: Callable[[], object]) -> tuple[list[float], list[dict]]:
    """The call as a graph: microseconds of each replay, and the kernels of one, the longest first."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [1000.0 * before.elapsed_time(after) for before, after in pairwise(marks)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    kernels = [
        {"name": event.key[:90], "launches": event.count / PROFILED, "us": event.self_device_time_total / PROFILED}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    return times, sorted(kernels, key=lambda kernel: -kernel["us"])


if __name__ == "__main__":
    main()
