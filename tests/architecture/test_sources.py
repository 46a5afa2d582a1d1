"""Rules about the sources themselves that no linter here states."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("wkvm_core", "wkvm_frontend", "wkvm_proto")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("os", "system")}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module] if node.module.partition(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in FORBIDDEN_NAMES:
                found.append(called.id)
            if isinstance(called, ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                if (owner, called.attr) in FORBIDDEN_CALLS or called.attr in FORBIDDEN_METHODS:
                    found.append(f"{owner}.{called.attr}")
    assert not found


def test_a_model_is_named_nowhere_outside_models_and_kernels() -> None:
    rooms = ("state", "sched", "store", "exec", "daemon")
    named = [
        str(path.relative_to(ROOT))
        for room in rooms
        for path in sorted((ROOT / "wkvm_core" / room).rglob("*.py"))
        if "rwkv" in path.read_text().lower()
    ]
    assert not named
