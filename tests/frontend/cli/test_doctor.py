from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from wkvm_frontend.cli import checks
from wkvm_frontend.cli.checks import Level
from wkvm_frontend.cli.main import main


def test_a_machine_that_can_serve_gets_zero(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert main(["doctor", "--model", "counting", "--port", port, "--store", str(tmp_path / "new")]) == 0
    shown = capfd.readouterr().out
    for subject in ("python", "packages", "torch", "model", "memory", "store", "sockets", "port"):
        assert subject in shown
    assert "FAIL" not in shown
    assert not (tmp_path / "new").exists()


def test_everything_wrong_is_told_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_ASK_TORCH", "")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setattr("wkvm_frontend.cli.local_http.LocalHttp.ready", _not_ready)
        assert main(["doctor", "--model", str(tmp_path / "none"), "--port", port, "--store", "/proc/none"]) == 1
    shown = capfd.readouterr()
    assert shown.out.count("FAIL") == 3
    assert shown.out.count("-> ") == 3
    assert "3 thing(s)" in shown.err


async def _not_ready(self: object) -> bool:
    return False


def test_an_old_python_is_named() -> None:
    assert checks.python_version((3, 10)).level is Level.BAD
    assert checks.python_version((3, 14)).level is Level.GOOD


def test_a_missing_package_is_named_with_the_command_that_brings_it() -> None:
    finding = checks.packages(("msgspec", "no-such-package-of-wkvm"))
    assert finding.level is Level.BAD
    assert "no-such-package-of-wkvm" in finding.remedy
    assert "msgspec" not in finding.text


@pytest.mark.parametrize("program", ["import sys; sys.exit('libcudart is missing')", "import os; os.abort()", ""])
def test_a_torch_that_does_not_load_is_a_finding_and_no_crash(program: str) -> None:
    assert checks.device((sys.executable, "-S", "-c", program)).level is Level.BAD


def test_model_files_are_looked_at(tmp_path: Path) -> None:
    assert checks.model_files("demo").level is Level.GOOD
    assert "is not there" in checks.model_files(str(tmp_path / "none")).text
    assert "holds no" in checks.model_files(str(tmp_path)).text
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert "is empty" in checks.model_files(str(tmp_path)).text
    weights.write_bytes(b"x" * 2**20)
    assert "holds no tokenizer" in checks.model_files(str(tmp_path)).text
    assert "tokenizer.json" in checks.model_files(str(weights)).remedy
    (tmp_path / "tokenizer.json").touch()
    assert checks.model_files(str(tmp_path)).text.endswith("1 MiB of weights")
    assert checks.model_files(str(weights)).level is Level.GOOD


def test_a_store_in_use_is_a_note_and_one_that_cannot_be_written_a_failure(tmp_path: Path) -> None:
    assert checks.store(tmp_path / "a" / "b").level is Level.GOOD
    lock = tmp_path / "LOCK"
    lock.touch()
    assert checks.store(tmp_path).level is Level.GOOD
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert checks.store(tmp_path).level is Level.NOTE
    assert checks.store(Path("/proc/none")).level is Level.BAD


def test_the_stores_place_is_that_of_the_core() -> None:
    assert checks.store_folder("", {"XDG_DATA_HOME": "/data"}) == Path("/data/wkvm")
    assert checks.store_folder("here", {}) == Path.cwd() / "here"


def test_a_port_is_free_taken_or_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert checks.port("127.0.0.1", port, None, False).level is Level.BAD
        served = checks.port("127.0.0.1", port, "tiny", True)
        assert (served.level, "serving tiny" in served.text) == (Level.NOTE, True)
    assert checks.port("127.0.0.1", port, None, False).level is Level.GOOD


def test_memory_is_set_against_weights_and_slots(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    config = {"model_type": "rwkv7", "num_hidden_layers": 2, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    slot = 2 * 128 * 66 * 4
    assert checks.slot_bytes(tmp_path) == slot
    model = str(tmp_path)
    assert f"room for 3 slots of {slot:,} bytes" in checks.memory(model, None, 1000 + 3 * slot).text
    assert checks.memory(model, 3, 1000 + 3 * slot).level is Level.GOOD
    short = checks.memory(model, 4, 1000 + 3 * slot)
    assert (short.level, short.remedy) == (Level.BAD, "ask for --slots 3")
    assert checks.memory(model, None, 900).level is Level.BAD
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert checks.slot_bytes(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert checks.memory(model, 10**9, 2**20).level is Level.GOOD


def test_available_memory_heeds_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert checks.available_memory(meminfo, tmp_path) == 2**21
    (tmp_path / "memory.max").write_text("max\n")
    assert checks.available_memory(meminfo, tmp_path) == 2**21
    (tmp_path / "memory.max").write_text("1000\n")
    assert checks.available_memory(meminfo, tmp_path) == 1000
    assert checks.available_memory(tmp_path / "none", tmp_path) is None


def test_sockets_need_a_short_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.sockets(dict(os.environ)).level is Level.GOOD
    monkeypatch.setattr("wkvm_frontend.cli.runtime_folder.MAX_SOCKET_PATH", 3)
    assert checks.sockets({}).level is Level.BAD
