from __future__ import annotations

import subprocess
import sys


def test_every_module_of_the_protocol_loads_neither_torch_nor_starlette() -> None:
    program = """
import importlib, pkgutil, sys
import wkvm_proto
for module in pkgutil.walk_packages(wkvm_proto.__path__, "wkvm_proto."):
    importlib.import_module(module.name)
heavy = {"torch", "numpy", "starlette", "uvicorn", "tokenizers", "jinja2", "safetensors", "transformers"}
print(sorted(heavy & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
