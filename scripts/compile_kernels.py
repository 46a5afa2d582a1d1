"""Triton's compiler without a GPU; see scripts/compile-kernels."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY = 90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Card:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Every configuration of an autotuned kernel is compiled, and all are equally fast."""

        def compiled(call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
            call()
            return [1.0 for _ in quantiles]

        return compiled


class Compiled:
    """The variants that were compiled, and those that could not be."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        """By hash of the variant."""
        self.failures: dict[str, str] = {}

    def install(self) -> None:
        """From now on a launch compiles and runs nothing."""
        real = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            name = kernel.__name__
            try:
                made = real(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self.failures.setdefault(f"{name}: {message}", message)
                raise
            if made.hash not in self.lines:
                self.lines[made.hash] = f"{name:40} {made.metadata.num_warps:2} warps  {resources(made.asm['cubin'])}"
            return made

        JITFunction.run = run  # type: ignore[method-assign]
        driver.set_active(Card())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """What a test makes of memory that no kernel wrote says nothing."""
        outcome = yield
        report = outcome.get_result()
        if report.failed:
            report.outcome, report.longrepr = "passed", None


def resources(cubin: bytes) -> str:
    """Registers, and bytes of stack (above 0: registers were spilled) and of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|SHARED):(\d+)", said))
    registers, stack, shared = (found.get(name, "?") for name in ("REG", "STACK", "SHARED"))
    return f"{registers:>3} registers  {stack:>4} stack  {shared:>6} shared"


def main() -> int:
    compiled = Compiled()
    compiled.install()
    given = sys.argv[1:] or ["tests/core/kernels"]
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu", *given], plugins=[compiled])
    for line in sorted(compiled.lines.values()):
        print(line)
    for failure in compiled.failures:
        print(f"FAILED {failure}")
    print(f"{len(compiled.lines)} variants compiled for sm_{CAPABILITY}, {len(compiled.failures)} not compiled")
    return 1 if compiled.failures or not compiled.lines or code not in (0, 1) else 0


if __name__ == "__main__":
    sys.exit(main())
