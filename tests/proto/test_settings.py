from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from wkvm_proto.settings import BadSettings, resolve, setting


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, setting("a name")] = "x"
    slots: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, setting("how many", group="memory")] = None
    fast: Annotated[bool, setting("quick")] = False
    core: Annotated[tuple[str, ...], setting("addresses")] = ()
    kind: Annotated[Literal["a", "b"], setting("which")] = "a"
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=9.0), setting("seconds")] = 1.0


def read(argv: list[str] | None = None, environment: dict[str, str] | None = None) -> Example:
    return resolve(Example, "example", argv or [], environment or {})


def test_nothing_given_is_the_defaults() -> None:
    assert read() == Example()


def test_the_file_gives_way_to_the_environment_and_that_to_flags(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('name = "file"\nslots = 1\nwait_s = 3\n')
    environment = {"WKVM_CONFIG": str(config), "WKVM_NAME": "env", "WKVM_SLOTS": "2"}
    assert read(["--name", "flag"], environment) == Example(name="flag", slots=2, wait_s=3.0)


def test_lists_and_booleans_are_read_from_every_source(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('core = ["a", "b"]\nfast = true\n')
    assert read(["--config", str(config)]) == Example(core=("a", "b"), fast=True)
    assert read([], {"WKVM_CORE": "a, b", "WKVM_FAST": "yes"}) == Example(core=("a", "b"), fast=True)
    assert read(["--core", "a,b", "--core", "c"]) == Example(core=("a", "b", "c"))
    assert read(["--core", "a", "--core", "b", "--fast"]) == Example(core=("a", "b"), fast=True)
    assert read(["--no-fast"], {"WKVM_FAST": "1"}) == Example()


def test_one_file_may_serve_several_programs(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('name = "all"\nother = 5\n[example]\nslots = 3\n[another]\nport = 1\n')
    assert read(["--config", str(config)]) == Example(name="all", slots=3)


@pytest.mark.parametrize(
    ("argv", "environment", "where"),
    [
        (["--slots", "0"], {}, "--slots"),
        (["--slots", "many"], {}, "--slots"),
        (["--kind", "c"], {}, "--kind"),
        (["--wait-s", "nan"], {}, "--wait-s"),
        (["--wait-s", "10"], {}, "--wait-s"),
        ([], {"WKVM_SLOTS": "-1"}, "WKVM_SLOTS"),
        ([], {"WKVM_FAST": "maybe"}, "WKVM_FAST"),
        (["--config", "/nowhere"], {}, "/nowhere"),
    ],
)
def test_a_bad_value_is_refused_with_the_place_it_came_from(argv, environment, where) -> None:
    with pytest.raises(BadSettings, match=where):
        read(argv, environment)


@pytest.mark.parametrize("text", ["nme = 1\n", "[example]\nnme = 1\n", "name = \n", "slots = 'x'\n", "\xff"])
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadSettings, match=r"c\.toml"):
        read(["--config", str(config)])
