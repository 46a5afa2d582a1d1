"""Configuration of a program, resolved once: TOML file, then `WKVM_` variables, then flags; the later wins.

A program declares one frozen struct; each field's metadata says its help, group and metavar. Field `max_rows` is the
flag `--max-rows`, the variable `WKVM_MAX_ROWS` and the TOML key `max_rows`.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

PREFIX = "WKVM_"

T = TypeVar("T", bound=msgspec.Struct)


class BadSettings(ValueError):
    """A setting is unknown or has a wrong value; the message says which and where it was given."""


def setting(help: str, *, group: str = "general", metavar: str | None = None) -> msgspec.Meta:
    """Annotation of a field of a settings struct: what `--help` says about it."""
    return msgspec.Meta(description=help, extra={"group": group, "metavar": metavar})


def resolve(
    kind: type[T], program: str, argv: Sequence[str], environment: Mapping[str, str], *, description: str = ""
) -> T:
    """The settings of a program from all sources. Raises BadSettings; `--help` exits as argparse does."""
    parser = _parser(kind, program, description)
    flags = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    names = {field.name for field in msgspec.structs.fields(kind)}
    config = flags.pop("config", None) or environment.get(PREFIX + "CONFIG")
    if config:
        for key, value in _read_toml(config, kind.__name__, program, names).items():
            values[key], origin[key] = value, f"{key} in {config}"
    for name in names:
        variable = PREFIX + name.upper()
        if environment.get(variable):
            values[name], origin[name] = _from_text(kind, name, environment[variable], variable), variable
        if flags.get(name) is not None:
            flag = "--" + name.replace("_", "-")
            given = flags[name]
            values[name] = given if isinstance(given, bool) else _from_text(kind, name, given, flag)
            origin[name] = flag
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadSettings(_name_origin(str(error), origin)) from None


def _parser(kind: type[msgspec.Struct], program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    groups: dict[str, Any] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        meta = _meta(hints[field.name])
        extra = meta.extra or {}
        group = str(extra.get("group", "general"))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        bare = _bare(hints[field.name])
        help_text = (meta.description or "").replace("%", "%%")
        if field.default not in (msgspec.NODEFAULT, None, "", ()):
            help_text += f" (default: {field.default})"
        flag = "--" + field.name.replace("_", "-")
        if bare is bool:
            groups[group].add_argument(
                flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=help_text
            )
        else:
            many = typing.get_origin(bare) is tuple
            groups[group].add_argument(
                flag,
                dest=field.name,
                default=None,
                action="append" if many else "store",
                metavar=extra.get("metavar") or field.name.upper(),
                help=help_text,
            )
    return parser


def _meta(hint: Any) -> msgspec.Meta:
    if typing.get_origin(hint) is Annotated:
        for part in hint.__metadata__:
            if isinstance(part, msgspec.Meta) and part.description:
                return part
    return msgspec.Meta()


def _bare(hint: Any) -> Any:
    if typing.get_origin(hint) is Annotated:
        return _bare(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kept = [part for part in typing.get_args(hint) if part is not type(None)]
        return _bare(kept[0]) if len(kept) == 1 else hint
    return hint


def _from_text(kind: type[msgspec.Struct], name: str, given: Any, where: str) -> Any:
    bare = _bare(typing.get_type_hints(kind, include_extras=True)[name])
    if typing.get_origin(bare) is tuple:
        parts = (given if isinstance(given, str) else ",".join(given)).split(",")
        return [part.strip() for part in parts if part.strip()]
    if bare is bool:
        truth = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if given.lower() not in truth:
            raise BadSettings(f"{where}: {given!r} is not yes or no")
        return truth[given.lower()]
    return given


def _read_toml(path: str, table: str, program: str, names: set[str]) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise BadSettings(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path}: {error}") from None
    # One file may serve several programs: a table named like the program overrides the top level.
    own = content.get(program, {})
    if not isinstance(own, dict):
        raise BadSettings(f"{path}: [{program}] is not a table")
    merged = {key: value for key, value in content.items() if not isinstance(value, dict)} | own
    for key in own:
        if key not in names:
            raise BadSettings(f"{path}: unknown setting {key!r} in [{program}]")
    if not own:
        for key in merged:
            if key not in names:
                raise BadSettings(f"{path}: unknown setting {key!r} for {program}")
    return {key: value for key, value in merged.items() if key in names}


def _name_origin(message: str, origin: Mapping[str, str]) -> str:
    for name, where in origin.items():
        if f"`$.{name}" in message:
            return f"{where}: {message.partition(' - at ')[0]}"
    return message
