"""Bare forward passes of the CPU beside the `rwkv` package; see scripts/bench-cpu."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from wkvm_core.models.checkpoint.folder import read_checkpoint
from wkvm_core.models.open import DEMO_MODEL, open_model
from wkvm_core.models.protocol import Batch, Model
from wkvm_core.models.rwkv7.names import canonical_tensors

ROWS = (1, 4, 16, 32)
PREFILL = 512
PACKAGE = "rwkv package"
Job = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-cpu")
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL, help="default: the embedded model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    jobs: dict[tuple[str, str], tuple[int, Job]] = {}
    for dtype, deterministic in (("float32", False), ("bfloat16", False), ("float32", True)):
        model = open_model(given.model, compute_dtype=dtype, deterministic=deterministic)
        who = f"{dtype}, deterministic" if deterministic else dtype
        jobs |= {(who, what): job for what, job in our_jobs(model).items()}
    jobs |= {(PACKAGE, what): job for what, job in package_jobs(given.model).items()}
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(given.rounds):
        for name, (_, job) in jobs.items():
            repeats = max(1, min(20, int(0.05 / seconds(job, 1))))
            best[name] = min(best[name], seconds(job, repeats))
    print(f"{given.model.name}, torch {torch.__version__}, {given.threads} threads; tokens/s (ms a call), best round")
    single = {what: jobs[PACKAGE, what][0] / best[PACKAGE, what] for who, what in jobs if who == PACKAGE}
    for (who, what), (tokens, _) in jobs.items():
        rate = tokens / best[who, what]
        reference = single["prefill"] if what == "prefill" else single["decode 1"]
        print(f"{who:24} {what:10} {rate:9.0f} ({best[who, what] * 1e3:8.2f})  {rate / reference:5.1f}x the package")


def seconds(job: Job, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        job()
    return (time.perf_counter() - start) / repeats


def our_jobs(model: Model) -> dict[str, tuple[int, Job]]:
    memory = torch.randn(max(ROWS) + 3, model.layout.slot_bytes // 4) * 0.1  # never time on zeros
    families = {}
    for family, offset in zip(model.layout.families, model.layout.offsets, strict=True):
        flat = memory[:, offset // 4 : (offset + family.nbytes) // 4]
        families[family.name] = flat.view(-1, family.layers, *family.shape)

    def batch(tokens: int, rows: int) -> Batch:
        slots = torch.arange(2, 2 + rows)
        offsets = tuple(range(0, tokens + 1, tokens // rows))
        ids = torch.randint(1, model.vocab_size, (tokens,))
        return Batch(ids, offsets, slots, slots, torch.tensor(offsets[1:]) - 1)

    def job(launch: Batch) -> Job:
        return lambda: model.forward(launch, families)

    jobs = {f"decode {rows}": (rows, job(batch(rows, rows))) for rows in ROWS}
    return jobs | {"prefill": (PREFILL, job(batch(PREFILL, 1)))}


def package_jobs(folder: Path) -> dict[str, tuple[int, Job]]:
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
    # It prints a banner when imported.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as scratch:
        from rwkv.model import RWKV

        checkpoint = read_checkpoint(folder)
        tensors, sizes = canonical_tensors(checkpoint.tensors, checkpoint.config)
        torch.save(dict(tensors), Path(scratch) / "model.pth")
        model = RWKV(model=str(Path(scratch) / "model"), strategy="cpu fp32")
    prompt = torch.randint(1, sizes.vocab, (PREFILL,)).tolist()
    state = [model.forward(prompt[:8], None)[1]]

    def decode() -> None:
        state[0] = model.forward([7], state[0])[1]

    return {"decode 1": (1, decode), "prefill": (PREFILL, lambda: model.forward(prompt, None))}


if __name__ == "__main__":
    main()
