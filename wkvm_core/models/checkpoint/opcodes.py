"""The few opcodes that describe a dict of tensors in a `.pth` file, interpreted without executing anything.

A `.pth` names functions and classes to be called. Here a name is only compared with the exact list below; it is never
looked up, imported or called. Whatever is not on the list is refused by name. Opcodes: protocol 2 of the format that
`torch.save` writes, and the memo and frame opcodes of protocol 4.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

from wkvm_core.errors import Refused
from wkvm_proto.names import ErrorCode

STORAGE_DTYPES: Final = {
    ("torch", "FloatStorage"): "float32",
    ("torch", "HalfStorage"): "float16",
    ("torch", "BFloat16Storage"): "bfloat16",
}
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_DICT = ("collections", "OrderedDict")
_MAX_BYTES = 64 << 20
_MAX_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of `numel` numbers of one dtype in the archive entry `data/<key>`."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor as the file describes it: counts in elements, not yet compared with the storage's real size."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    module: str
    name: str


class _Mark:
    pass


def read_tensors(code: bytes) -> dict[str, Placed]:
    """The dict of tensors that `code` describes. Raises Refused(BAD_WEIGHTS) for anything else."""
    if len(code) > _MAX_BYTES:
        raise _refuse("its table of contents is too large")
    try:
        value = _Interpreter(code).run()
    except (struct.error, IndexError, UnicodeDecodeError, KeyError):
        raise _refuse("its table of contents is damaged") from None
    if not isinstance(value, dict):
        raise _refuse("it holds no dict of tensors")
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise _refuse("a tensor's name is not text")
        if not isinstance(tensor, Placed):
            raise _refuse(f"entry {name!r} is not a plain tensor")
    return value


def _refuse(why: str) -> Refused:
    return Refused(ErrorCode.BAD_WEIGHTS, f"the .pth file is not accepted: {why}")


@dataclass(slots=True)
class _Interpreter:
    code: bytes
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        for _ in range(_MAX_VALUES):
            opcode = self._take(1)
            if opcode == b".":
                return self.stack.pop()
            self._step(opcode)
        raise _refuse("its table of contents is too long")

    def _step(self, opcode: bytes) -> None:
        push = self.stack.append
        match opcode:
            case b"\x80":
                if (version := self._unsigned(1)) > 5:
                    raise _refuse(f"it uses protocol {version}")
            case b"\x95":
                self._take(8)
            case b"}":
                push({})
            case b")":
                push(())
            case b"(":
                push(_Mark())
            case b"X":
                push(self._take(self._unsigned(4)).decode())
            case b"\x8c":
                push(self._take(self._unsigned(1)).decode())
            case b"J":
                push(struct.unpack("<i", self._take(4))[0])
            case b"K":
                push(self._unsigned(1))
            case b"M":
                push(self._unsigned(2))
            case b"\x8a":
                push(int.from_bytes(self._take(self._unsigned(1)), "little", signed=True))
            case b"\x88":
                push(True)
            case b"\x89":
                push(False)
            case b"q":
                self.memo[self._unsigned(1)] = self.stack[-1]
            case b"r":
                self.memo[self._unsigned(4)] = self.stack[-1]
            case b"\x94":
                self.memo[len(self.memo)] = self.stack[-1]
            case b"h":
                push(self.memo[self._unsigned(1)])
            case b"j":
                push(self.memo[self._unsigned(4)])
            case b"\x85" | b"\x86" | b"\x87":
                count = opcode[0] - 0x84
                push(tuple(self._pop_many(count)))
            case b"t":
                push(tuple(self._pop_to_mark()))
            case b"c":
                push(_name(self._line(), self._line()))
            case b"\x93":
                module, name = self._pop_many(2)
                push(_name(module, name))
            case b"Q":
                push(_storage(self.stack.pop()))
            case b"R":
                callee, arguments = self._pop_many(2)
                push(_build(callee, arguments))
            case b"s":
                key, value = self._pop_many(2)
                self._set_items([key, value])
            case b"u":
                self._set_items(self._pop_to_mark())
            case b"b":
                # A module's state dict carries a table of versions as an attribute; it is no tensor and is left behind.
                self.stack.pop()
                if not isinstance(self.stack[-1], dict):
                    raise _refuse("an attribute is set on something that is not a dict")
            case _:
                raise _refuse(f"opcode 0x{opcode.hex()} at byte {self.at - 1} describes no tensor")

    def _take(self, count: int) -> bytes:
        if self.at + count > len(self.code):
            raise IndexError(count)
        piece = self.code[self.at : self.at + count]
        self.at += count
        return piece

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _line(self) -> str:
        end = self.code.index(b"\n", self.at) if b"\n" in self.code[self.at : self.at + 512] else -1
        if end < 0:
            raise IndexError("line")
        line = self.code[self.at : end].decode()
        self.at = end + 1
        return line

    def _pop_many(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError(count)
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        for depth, value in enumerate(reversed(self.stack)):
            if isinstance(value, _Mark):
                values = self.stack[len(self.stack) - depth :]
                del self.stack[len(self.stack) - depth - 1 :]
                return values
        raise IndexError("mark")

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise _refuse("items are set on something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise _refuse("a tensor's name is not text")
            target[key] = value


def _name(module: object, name: object) -> _Name:
    if (module, name) not in (_TENSOR, _PARAMETER, _DICT, *STORAGE_DTYPES):
        raise _refuse(f"it names {str(module)[:100]}.{str(name)[:100]}, which is not a plain dense tensor")
    return _Name(str(module), str(name))


def _storage(reference: object) -> Storage:
    match reference:
        case ("storage", _Name(module=module, name=name), str(key), str(_), int(numel)) if (
            dtype := STORAGE_DTYPES.get((module, name))
        ) is not None and numel >= 0:
            return Storage(key, dtype, numel)
    raise _refuse("a storage is described in an unknown way")


def _build(callee: object, arguments: object) -> Any:
    """What a call described in the file stands for; nothing is called."""
    if not isinstance(callee, _Name) or not isinstance(arguments, tuple):
        raise _refuse("something is called that is not a plain dense tensor")
    named = (callee.module, callee.name)
    if named == _DICT and arguments == ():
        return {}
    if named == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], Placed):
        return arguments[0]
    if named == _TENSOR and len(arguments) in (6, 7):
        storage, offset, shape, stride, _, hooks = arguments[:6]
        if isinstance(storage, Storage) and _counts((offset,)) and _counts(shape) and _counts(stride) and hooks == {}:
            return Placed(storage, offset, shape, stride)
    raise _refuse(f"{callee.module}.{callee.name} is used in an unknown way")


def _counts(values: object) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)
