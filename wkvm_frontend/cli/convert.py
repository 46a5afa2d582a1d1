"""`wkvm convert`: weights of another format into a model folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Becomes the converter, which is the core's: the frontend never imports it."""
    os.execv(sys.executable, [sys.executable, "-m", "wkvm_core.models.convert", *argv])  # noqa: S606 - our own program
