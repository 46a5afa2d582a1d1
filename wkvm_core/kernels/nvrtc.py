"""CUDA C++ sources compiled when first used (NVRTC, which comes with torch), and launched on torch's current stream.

Cubins are kept in the user's cache folder under the hash of source, options and compiler, so a second start compiles
nothing. Importing this raises ImportError where the compiler or its bindings are not installed."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from cuda.bindings import driver, nvrtc

from wkvm_core.errors import DeviceLost
from wkvm_core.kernels.launch import PDL


def _compiler() -> tuple[int, int]:
    """The compiler's version, once it is loaded. The bindings look for it in the folders of the interpreter; its wheel
    may also lie elsewhere on the path."""
    try:
        return _version()
    except RuntimeError:
        places = [library for folder in sys.path for library in Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*")]
        if not places:
            raise ImportError("the library of NVRTC is not installed") from None
        for built_in in places[0].parent.glob("libnvrtc-builtins.so.*"):  # it would look for them elsewhere
            ctypes.CDLL(str(built_in))
        ctypes.CDLL(str(places[0]))
        return _version()


def _version() -> tuple[int, int]:
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


_VERSION: Final = _compiler()


class CompileError(RuntimeError):
    """The compiler's log."""


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, function: Any, types: Sequence[Any], shared_bytes: int, *, early: bool) -> None:
        self._function = function
        self._types = tuple(types)
        self._config = driver.CUlaunchConfig()
        self._config.sharedMemBytes = shared_bytes
        if shared_bytes:
            attribute_name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute_name, shared_bytes)[0], "shared memory")
        if PDL and early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs = [attribute]
            self._config.numAttrs = 1

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: Any) -> None:
        """Launches it; tensors are given as pointers, other arguments as numbers of the declared C types."""
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        _check(driver.cuLaunchKernelEx(config, self._function, (values, self._types), 0)[0], "a launch")


class Module:
    """Instances of templates of one source on the current device."""

    def __init__(self, source: Path, instances: Sequence[str], device: torch.device) -> None:
        """instances: name expressions such as `step<float, half_t>`. Raises CompileError."""
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes the context current
            major, minor = torch.cuda.get_device_capability(device)
            cubin, names = compiled(source.read_text(), tuple(instances), f"sm_{major}{minor}")
            status, self._module = driver.cuModuleLoadData(cubin)
            _check(status, f"loading {source.name}")
        self._names = dict(zip(instances, names, strict=True))

    def kernel(self, instance: str, types: Sequence[Any], *, shared_bytes: int = 0, early: bool = True) -> Kernel:
        """The instance, its parameters being of these ctypes, with so much dynamic shared memory a block.

        early: it may start while the launch before it ends; see `wkvm_core.kernels.launch`."""
        status, function = driver.cuModuleGetFunction(self._module, self._names[instance])
        _check(status, instance)
        return Kernel(function, types, shared_bytes, early=early)


def _check(status: Any, what: str) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceLost(f"{what}: {status.name}")


POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong


def compiled(source: str, instances: tuple[str, ...], arch: str) -> tuple[bytes, list[bytes]]:
    """The cubin and the instances' mangled names. Needs no GPU. Raises CompileError."""
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    key = blake3(repr((source, instances, options, _VERSION)).encode()).hexdigest()
    kept = _cache() / f"{key}.cubin"
    try:
        head, _, cubin = kept.read_bytes().partition(b"\0\0")
        if cubin:
            return cubin, head.split(b"\0")
    except OSError:
        pass
    cubin, names = _compile(source, instances, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = kept.with_suffix(f".{os.getpid()}")
        whole.write_bytes(b"\0".join(names) + b"\0\0" + cubin)
        whole.replace(kept)
    except OSError:
        pass  # a cache is a convenience
    return cubin, names


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wkvm" / "cubin"


def _compile(source: str, instances: tuple[str, ...], options: list[bytes]) -> tuple[bytes, list[bytes]]:
    program = _asked(nvrtc.nvrtcCreateProgram(source.encode(), b"wkvm.cu", 0, [], []))
    try:
        for instance in instances:
            _asked(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_asked(nvrtc.nvrtcGetProgramLogSize(program)))
            _asked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(log.rstrip(b"\0").decode(errors="replace"))
        names = [bytes(_asked(nvrtc.nvrtcGetLoweredName(program, instance.encode()))) for instance in instances]
        cubin = bytearray(_asked(nvrtc.nvrtcGetCUBINSize(program)))
        _asked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), names
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _asked(answer: tuple[Any, ...]) -> Any:
    """The value that a call of the compiler gives with its status, if any. Raises CompileError."""
    status, *value = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(status.name)
    return value[0] if value else None
