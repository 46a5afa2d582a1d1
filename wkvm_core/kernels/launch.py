"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it reads its results.

Every kernel of ours that is launched so calls `gdc_wait` before it touches what an earlier launch of the same forward
pass wrote. Until then it reads only what is older than the pass: weights, slots, and states, each of which a pass reads
once. Between two passes stand launches of the ordinary kind, which wait for all before them.
"""

from __future__ import annotations

from typing import Any, Final

import torch


def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


PDL: Final = _supported()
"""The card has it (compute capability 9.0)."""
LAUNCH: Final[dict[str, Any]] = {"launch_pdl": True} if PDL else {}
"""What a launch of such a kernel is told."""
