"""How long the sampler of a GPU takes: `python -m wkvm_core.bench.sampler --rows 1 64 1024`."""

from __future__ import annotations

import argparse
import statistics

import torch

from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.lanes import Lanes
from wkvm_core.kernels.lane import SAMPLE
from wkvm_core.kernels.sample.gpu import BLOCK, NUM_WARPS
from wkvm_core.sched.plan import LaneImage
from wkvm_proto.sampling import MAX_OUTPUT_TOKENS, Sampling

REQUESTS = {
    "greedy": Sampling(MAX_OUTPUT_TOKENS, temperature=0.0),
    "temperature 0.8": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8),
    "top-p 0.95": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8, top_p=0.95),
    "top-k 50": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8, top_k=50),
    "top-k 50, top-p 0.95": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8, top_k=50, top_p=0.95),
    "min-p 0.05": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8, min_p=0.05),
    "penalties": Sampling(MAX_OUTPUT_TOKENS, temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1),
}
SPREADS = (1.0, 4.0)
"""Standard deviations of the logits: a flat row and a sharp one."""


def main(argv: list[str] | None = None) -> None:
    """Prints microseconds a launch, medians over replays of a graph of several launches."""
    parser = argparse.ArgumentParser(prog="python -m wkvm_core.bench.sampler", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--block", type=int, nargs="+", default=[BLOCK])
    parser.add_argument("--warps", type=int, nargs="+", default=[NUM_WARPS])
    given = parser.parse_args(argv)
    for rows in given.rows:
        lanes = Lanes.open(rows, given.vocab, "cuda", num_halt_sets=1)
        logits = torch.randn(rows, given.vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        for block in given.block:
            for num_warps in given.warps:
                sampler = GpuSampler(lanes, rows, block=block, num_warps=num_warps)
                for name, sampling in REQUESTS.items():
                    for lane in range(rows):
                        lanes.seat(lane, LaneImage(sampling, sample=lane))
                    times = [f"{launch_us(sampler, logits * spread):8.1f}" for spread in SPREADS]
                    print(f"rows {rows:5}  block {block:5}  warps {num_warps:2}  {name:20}", *times, flush=True)


def launch_us(sampler: GpuSampler, logits: torch.Tensor, *, launches: int = 20, replays: int = 11) -> float:
    """Microseconds of one launch over all lanes, from within a graph."""
    rows = len(logits)
    lanes = torch.arange(rows, device=logits.device)
    asks = torch.full((rows,), SAMPLE, device=logits.device)
    out = torch.zeros(2, rows, dtype=torch.int64, device=logits.device)
    sampler.sample(logits, lanes, asks, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            sampler.sample(logits, lanes, asks, out)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = _clock(), _clock()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)) / launches)
    return statistics.median(times)


def _clock() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
