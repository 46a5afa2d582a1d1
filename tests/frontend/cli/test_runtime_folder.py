from __future__ import annotations

import os
from pathlib import Path

import pytest

from wkvm_frontend.cli.runtime_folder import SOCKET_NAME, base_folder, runtime_folder


def test_a_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / SOCKET_NAME).touch()
    assert not list(tmp_path.iterdir())


def test_a_path_too_long_for_a_socket_is_not_chosen(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with runtime_folder({"XDG_RUNTIME_DIR": str(long)}) as folder:
        assert len(os.fsencode(folder / SOCKET_NAME)) <= 107
    assert base_folder({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) != tmp_path / "missing"


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_folder_is_not(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    left, foreign = tmp_path / "wkvm-left", tmp_path / "wkvm-foreign"
    for folder in (left, foreign):
        folder.mkdir()
    (left / "alive").touch()
    with runtime_folder(environment) as living:
        for folder in (left, foreign, living):
            os.utime(folder, (0, 0))
        with runtime_folder(environment):
            assert not left.exists()
            assert foreign.exists()
            assert living.exists()


def test_no_usable_folder_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wkvm_frontend.cli.runtime_folder.MAX_SOCKET_PATH", 3)
    with pytest.raises(OSError, match="no folder for sockets"):
        base_folder({})
