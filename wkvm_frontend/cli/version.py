"""`wkvm version`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PARTS = ("torch", "pyzmq", "msgspec", "starlette", "uvicorn", "tokenizers")


def main(argv: Sequence[str]) -> int:
    """Prints the version of wkvm; with --all also those of Python and what it stands on."""
    print(f"wkvm {own_version()}")
    if "--all" in argv:
        print(f"python {platform.python_version()}")
        for part in PARTS:
            print(f"{part} {installed(part) or 'missing'}")
    return 0


def own_version() -> str:
    """Of the installed package."""
    return installed("wkvm") or "unknown"


def installed(package: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
