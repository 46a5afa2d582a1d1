from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.frontend.cli.surveys import SURVEY
from wkvm_frontend.cli import checks, device
from wkvm_frontend.cli.checks import Finding, Level, Needs
from wkvm_frontend.cli.main import main
from wkvm_proto.survey import Card, Survey


def test_a_machine_that_can_serve_gets_zero(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert main(["doctor", "--model", "counting", "--port", port, "--store", str(tmp_path / "new")]) == 0
    shown = capfd.readouterr().out
    for subject in ("python", "packages", "torch", "model", "memory", "device", "store", "sockets", "port"):
        assert subject in shown
    assert "FAIL" not in shown
    assert not (tmp_path / "new").exists()


def test_everything_wrong_is_told_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Finding(Level.BAD, "torch", "cannot be loaded", "install torch again")
    monkeypatch.setattr(device, "survey", lambda *_: nothing)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setattr("wkvm_frontend.cli.local_http.LocalHttp.ready", _not_ready)
        assert main(["doctor", "--model", str(tmp_path / "none"), "--port", port, "--store", "/proc/none"]) == 1
    shown = capfd.readouterr()
    assert shown.out.count("FAIL") == 4
    assert shown.out.count("-> ") == 4
    assert "4 thing(s)" in shown.err


def serving(survey: Survey, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[str]]:
    """What doctor is told to hand on, and its code, on such a machine."""
    told: list[str] = []

    def found(flags: Sequence[str], environment: dict[str, str]) -> Survey:
        told.extend(flags)
        return survey

    monkeypatch.setattr(device, "survey", found)
    return main(["doctor", "--port", "0", *flags]), told


def test_flags_that_serve_hands_on_to_the_core_are_handed_on_to_the_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--device", "cuda:0", "--state-dtype", "float16", "--deterministic", "--no-deterministic", "--max-rows=9"]
    ours = ["--model", "counting", "--slots", "3", "--store", str(tmp_path), "--frontends", "2", "--access-log"]
    code, told = serving(SURVEY, monkeypatch, *ours, *given)
    assert code == 0
    assert told[-len(given) :] == given
    assert " ".join(told).startswith(f"--model counting --drain-s 10.0 --store {tmp_path} --slots 3")
    assert "--frontends" not in told
    assert "--access-log" not in told


def test_a_gpu_is_told_with_its_packages_and_the_slots_that_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "gpu_packages", lambda: Finding(Level.GOOD, "gpu", "triton 3.6"))
    card = Card("NVIDIA H200", (9, 0), 100 * 2**30, 99 * 2**30)
    survey = msgspec.structs.replace(SURVEY, device="cuda:0", card=card, slot_bytes=2**20, weight_bytes=9 * 2**30)
    store = ["--store", str(tmp_path)]
    assert serving(survey, monkeypatch, "--model", "random:1.5b", *store)[0] == 0
    shown = capfd.readouterr().out
    assert "cuda:0: NVIDIA H200" in shown
    assert "triton 3.6" in shown
    assert f"room for {80 * 1024:,} slots" in shown  # 90 GiB of 100 less 1 that others hold and 9 of weights


def test_more_slots_than_the_gpu_holds_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card = Card("NVIDIA H200", (9, 0), 10 * 2**20, 10 * 2**20)
    survey = msgspec.structs.replace(SURVEY, device="cuda:0", card=card, slot_bytes=2**20, slots=10)
    assert serving(survey, monkeypatch, "--model", "counting", "--store", str(tmp_path), "--slots", "10")[0] == 1
    assert "ask for --slots 9" in capfd.readouterr().out


@pytest.mark.parametrize("flag", ["--core", "--socket"])
def test_what_serve_sets_itself_is_refused_as_serve_does(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", flag, "x"]) == 2
    assert "is set by wkvm serve itself" in capfd.readouterr().err


def test_a_flag_that_no_program_knows_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--port", "0", "--store", str(tmp_path), "--modle", "x"]) == 1
    assert "unrecognized arguments: --modle" in capfd.readouterr().out


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
    needs = checks.needs_of_files(tmp_path)
    assert needs == Needs(1000, slot)
    assert checks.needs_of_files(tmp_path, "bfloat16").slot == slot // 2
    assert f"room for 3 slots of {slot:,} bytes" in checks.memory(needs, None, 1000 + 3 * slot).text
    assert checks.memory(needs, 3, 1000 + 3 * slot).level is Level.GOOD
    short = checks.memory(needs, 4, 1000 + 3 * slot)
    assert (short.level, short.remedy) == (Level.BAD, "ask for --slots 3")
    assert checks.memory(needs, None, 1000 + slot - 1).remedy == "choose a smaller model"
    assert checks.memory(needs, None, 900).level is Level.BAD


@pytest.mark.parametrize("config", ['{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128}', "{", ""])
def test_slots_of_a_size_that_the_files_do_not_tell_are_not_counted(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    needs = checks.needs_of_files(tmp_path)
    assert needs.slot is None
    assert checks.memory(needs, 10**9, 2**20).level is Level.GOOD


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
