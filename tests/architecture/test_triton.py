"""Triton is for the kernels of a GPU and is loaded only where they run."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.architecture.test_sources import ROOT, SOURCES

_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # whoever imports it now fails
import wkvm_core.bench.main, wkvm_core.daemon.main, wkvm_frontend.cli.main, wkvm_frontend.main
from wkvm_core.models.open import DEMO_MODEL, open_model
print(open_model(DEMO_MODEL).name)
"""


def imported(tree: ast.AST) -> set[str]:
    """Top-level packages that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_only_kernels_for_the_gpu_import_triton() -> None:
    users = {path.relative_to(ROOT) for path in SOURCES if "triton" in imported(ast.parse(path.read_text()))}
    assert {path for path in users if path.parts[:2] != ("wkvm_core", "kernels") or path.name != "gpu.py"} == set()


def test_every_program_starts_and_opens_a_model_on_the_cpu_without_triton() -> None:
    command = [sys.executable, "-W", "error", "-c", _WITHOUT_TRITON]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "wkvm-demo\n"
