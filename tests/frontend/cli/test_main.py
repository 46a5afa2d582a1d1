from __future__ import annotations

import os
import sys

import pytest

from wkvm_frontend.cli.main import COMMANDS, main


def test_help_lists_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capfd.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["sing"], ["--version-x"]])
def test_a_wrong_call_exits_with_two(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: wkvm" in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["version", "--help"], ["bench", "serve", "--help"]])
def test_help_tells_no_default_that_is_not_one(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 0
    shown = capfd.readouterr().out
    assert f"usage: wkvm {' '.join(argv[:-1])}" in shown
    assert "(default: 0)" not in shown.replace("arrivals (default: 0)", "")


def test_a_wrong_flag_of_version_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version", "--al"])
    assert end.value.code == 2
    assert "--al" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_commands_help_is_its_own(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    shown = capfd.readouterr().out
    assert f"usage: wkvm {command}" in shown
    assert "--port" in shown


def test_the_version_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capfd.readouterr().out.startswith("wkvm 0.")
    assert main(["version", "--all"]) == 0
    assert "msgspec" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("argv", "module"),
    [(["bench", "engine", "--x", "1"], "wkvm_core.bench"), (["convert", "--x", "1"], "wkvm_core.models.convert")],
)
def test_programs_of_the_core_are_become_with_their_flags(
    argv: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Became(Exception):
        pass

    def become(program: str, command: list[str]) -> None:
        assert program == sys.executable
        raise Became(command)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(Became) as called:
        main(argv)
    assert called.value.args == ([sys.executable, "-m", module, "--x", "1"],)


def test_bench_needs_to_be_told_what(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "--help"]) == 0
    assert "engine" in capfd.readouterr().out
