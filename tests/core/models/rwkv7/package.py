"""The `rwkv` package as the reference, in a process of its own: it compiles itself and warns when it is imported.

`python package.py CASES OUT`: CASES is JSON `[{"checkpoint": ..., "tokens": [...], "greedy": n}, ...]`; OUT becomes a
safetensors file with `logits.<i>` of every token, `wkv.<i>`, `att.<i>` and `ffn.<i>` after the last one, and
`greedy.<i>`, the ids that follow."""

from __future__ import annotations

import json
import os
import sys


def main(cases_path: str, out_path: str) -> None:
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
    import torch
    from rwkv.model import RWKV  # type: ignore[import-untyped]
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    with open(cases_path) as file:
        cases = json.load(file)
    out = {}
    for number, case in enumerate(cases):
        model = RWKV(model=case["checkpoint"].removesuffix(".pth"), strategy="cpu fp32")
        logits, state = [], None
        for token in case["tokens"]:
            row, state = model.forward([token], state)
            logits.append(row.clone())
        out[f"logits.{number}"] = torch.stack(logits)
        for offset, name in enumerate(("att", "wkv", "ffn")):
            out[f"{name}.{number}"] = torch.stack([plane.clone() for plane in state[offset::3]])
        greedy = [int(logits[-1].argmax())]
        while len(greedy) < case["greedy"]:
            row, state = model.forward([greedy[-1]], state)
            greedy.append(int(row.argmax()))
        out[f"greedy.{number}"] = torch.tensor(greedy)
    save_file(out, out_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
