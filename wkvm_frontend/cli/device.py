"""The device that `wkvm serve` would use, looked at for `wkvm doctor`: the core's program is asked in a process of its
own, which may crash without harm."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from wkvm_frontend.cli.checks import Finding, Level
from wkvm_frontend.cli.version import installed
from wkvm_proto.survey import Card, Survey

ASK = (sys.executable, "-m", "wkvm_core.daemon.survey")
ASK_S = 120.0
GPU_PACKAGES = ("triton", "cuda-bindings")
DEPENDENT_LAUNCHES = (9, 0)
"""Compute capability from which a kernel starts while the one before it ends."""
_EXIT_BAD_CONFIG = 78
_EXIT_USAGE = 2


def survey(flags: Sequence[str], environment: dict[str, str], command: Sequence[str] = ASK) -> Survey | Finding:
    """What a core with these flags would find, or why that cannot be told."""
    try:
        asked = subprocess.run(
            [*command, *flags], capture_output=True, text=True, timeout=ASK_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return Finding(Level.BAD, "torch", f"does not load within {ASK_S:.0f} s", "look at the machine's load")
    reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    if asked.returncode in (_EXIT_BAD_CONFIG, _EXIT_USAGE):
        remedy = "see `wkvm serve --help` and `wkvm-core --help`"
        return Finding(Level.BAD, "settings", reason.removeprefix("wkvm-core: error: "), remedy)
    try:
        if asked.returncode == 0:
            return msgspec.json.decode(asked.stdout, type=Survey)
    except msgspec.MsgspecError:
        reason = "it says nothing that can be read"
    return Finding(Level.BAD, "torch", f"cannot be loaded: {reason}", "install torch again")


def torch(found: Survey) -> Finding:
    """The one that is installed."""
    built = f"built for CUDA {found.cuda}" if found.cuda else "built without CUDA"
    return Finding(Level.GOOD, "torch", f"{found.torch}, {built}")


def device(found: Survey, driver: str | None) -> Finding:
    """What models run on. driver: version of the GPU driver of this machine, if there is one."""
    if found.refusal:
        return Finding(Level.BAD, "device", found.refusal, "choose another with --device: auto, cpu, cuda or cuda:N")
    if found.card is not None:
        return Finding(Level.GOOD, "device", f"{found.device}: {_described(found.card)}, driver {driver or 'unknown'}")
    text = f"{found.device}, {found.threads} threads"
    if driver is None or found.wanted != "auto":
        return Finding(Level.GOOD, "device", text)
    text += f", although there is a GPU's driver ({driver})"
    if not found.cuda:
        return Finding(Level.NOTE, "device", f"{text}: torch is built without CUDA", "install a torch that has CUDA")
    return Finding(
        Level.NOTE,
        "device",
        f"{text}: torch, built for CUDA {found.cuda}, finds no GPU",
        "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough",
    )


def _described(card: Card) -> str:
    major, minor = card.capability
    early = "with" if card.capability >= DEPENDENT_LAUNCHES else "without"
    return f"{card.name}, compute capability {major}.{minor} ({early} dependent launches)"


def gpu_packages(version: Callable[[str], str | None] = installed) -> Finding:
    """Those that serving from a GPU takes besides the others. version: of a package, None when it is not there."""
    versions = {name: version(name) for name in GPU_PACKAGES}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        remedy = f"{sys.executable} -m pip install 'wkvm[gpu]', or serve with --device cpu"
        return Finding(Level.BAD, "gpu", f"missing: {', '.join(missing)}", remedy)
    return Finding(Level.GOOD, "gpu", ", ".join(f"{name} {found}" for name, found in versions.items()))


def usable_bytes(found: Survey) -> int:
    """Of the GPU's memory, as the settings say and others leave it."""
    assert found.card is not None, found
    kept_back = int((1.0 - found.gpu_memory_utilization) * found.card.total_bytes)
    return max(found.card.free_bytes - kept_back, 0)


def driver_version(told: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Of the GPU driver that the kernel has loaded."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", told.read_text())
    except OSError:
        return None
    return found[0] if found else "unknown"
