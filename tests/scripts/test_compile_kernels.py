from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def doubled(source, target, SIZE: tl.constexpr):
    for place in range(1):
        {line}
    places = tl.arange(0, SIZE)
    tl.store(target + places, 2 * tl.load(source + places))


def test_it_doubles():
    given = torch.arange(8.0)
    made = torch.zeros(8)
    doubled[(1,)](given, made, SIZE=8)
    assert torch.equal(made, 2 * given)
"""


def run(folder: Path, line: str, *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program over a test of a kernel with such a line in it."""
    file = folder / "test_kernel.py"
    file.write_text(KERNEL.format(line=line))
    own = {"WKVM_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [*program, str(file)], cwd=ROOT, env=os.environ | own | environment, capture_output=True, text=True
    )


def test_a_kernel_is_compiled_and_its_registers_are_told(tmp_path: Path) -> None:
    result = run(tmp_path, "pass", "scripts/compile-kernels")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 variants compiled for sm_90, 0 not compiled" in result.stdout
    assert " registers " in result.stdout


def test_a_kernel_that_only_the_interpreter_accepts_is_refused(tmp_path: Path) -> None:
    interpreted = run(tmp_path, "break", sys.executable, "-m", "pytest", "-q", TRITON_INTERPRET="1")
    assert interpreted.returncode == 0, interpreted.stdout
    result = run(tmp_path, "break", "scripts/compile-kernels")
    assert result.returncode == 1
    assert "FAILED doubled: UnsupportedLanguageConstruct" in result.stdout
