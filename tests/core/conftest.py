from __future__ import annotations

import os

import torch

# Where there is no GPU, Triton runs kernels in its interpreter, on tensors of the CPU. Triton looks when it is imported
# and when a kernel is declared, so this stands where pytest passes before any test of the core is loaded. Nothing else
# of wkvm imports Triton on a CPU (tests/architecture/test_triton.py), and so nothing else notices.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # scripts/compile-kernels sets 0
