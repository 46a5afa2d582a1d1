"""The CUDA C++ sources, compiled without a GPU in every variant that the code asks for."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.core.kernels.closeness import DTYPES

if sys.platform != "linux":
    pytest.skip("its compiler comes for Linux", allow_module_level=True)

from wkvm_core.kernels import nvrtc
from wkvm_core.kernels.project import cuda as project
from wkvm_core.kernels.wkv7 import cuda as wkv7

ROOT = Path(nvrtc.__file__).parent.parent
ARCH = "sm_90"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def assert_compiles(source: Path, instances: list[str]) -> None:
    cubin, names = nvrtc.compiled(source.read_text(), tuple(instances), ARCH)
    assert cubin.startswith(b"\x7fELF")
    assert len(set(names)) == len(set(instances))
    assert all(name in cubin for name in names)


@pytest.mark.parametrize("dither", [True, False])
@pytest.mark.parametrize("state", DTYPES)
def test_the_kernels_of_wkv7_compile_for_every_pair_of_dtypes(state: torch.dtype, dither: bool) -> None:
    if state == torch.float32 and dither:
        assert wkv7.scan_instances(state, state, dither=True) == wkv7.scan_instances(state, state, dither=False)
        return
    streams = [wkv7.stream_instances(state, dtype, dither=dither) for dtype in DTYPES]
    scans = [wkv7.scan_instances(state, dtype, dither=dither) for dtype in DTYPES]
    assert_compiles(wkv7.SOURCE, [name for made in (*streams, *scans) for name in made.values()])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_products_of_few_tokens_compile_for_both_dtypes(dtype: torch.dtype) -> None:
    assert_compiles(project.SOURCE, list(project.instances(dtype).values()))


def test_every_source_is_compiled_here_and_is_packaged() -> None:
    sources = set(ROOT.rglob("*.cu"))
    assert sources == {wkv7.SOURCE, project.SOURCE}
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["wkvm_core"]
    assert sources <= {path for pattern in patterns for path in ROOT.glob(pattern)}


def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source, instances = "template <int N> __global__ void f(int* x) { *x = N; }", ("f<1>", "f<2>")
    made = nvrtc.compiled(source, instances, ARCH)
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compiled(source, instances, ARCH) == made


@pytest.mark.parametrize(("source", "said"), [("nonsense", "nonsense"), ("__global__ void g() {}", "f<1>")])
def test_what_does_not_compile_is_said_with_the_compilers_log(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(nvrtc.CompileError, match=said):
        nvrtc.compiled(source, ("f<1>",), ARCH)
    assert not list(tmp_path.rglob("*.cubin"))


def test_a_program_that_does_not_compile_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given_back = [], []
    create, destroy = nvrtc.nvrtc.nvrtcCreateProgram, nvrtc.nvrtc.nvrtcDestroyProgram

    def noted_create(*given: object) -> object:
        status, program = create(*given)
        made.append(int(program))
        return status, program

    def noted_destroy(program: object) -> object:
        given_back.append(int(program))  # type: ignore[call-overload]
        return destroy(program)

    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcCreateProgram", noted_create)
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcDestroyProgram", noted_destroy)
    with pytest.raises(nvrtc.CompileError):
        nvrtc.compiled("nonsense", ("f<1>",), ARCH)
    nvrtc.compiled("template <int N> __global__ void f(int* x) { *x = N; }", ("f<1>",), ARCH)
    assert len(made) == 2
    assert given_back == made
