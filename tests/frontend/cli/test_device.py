from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.frontend.cli.surveys import SURVEY
from wkvm_frontend.cli import device
from wkvm_frontend.cli.checks import Finding, Level
from wkvm_proto.survey import Card, Survey

H200 = Card("NVIDIA H200", (9, 0), 1000, 800)
ENVIRONMENT = dict(os.environ)


def found(**fields: Any) -> Survey:
    return msgspec.structs.replace(SURVEY, **fields)


def ask(program: str) -> Survey | Finding:
    return device.survey([], ENVIRONMENT, (sys.executable, "-S", "-c", program))


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit('libcudart is missing')", "import os; os.abort()", "", "print('{}')"]
)
def test_a_torch_that_does_not_load_is_a_finding_and_no_crash(program: str) -> None:
    told = ask(program)
    assert isinstance(told, Finding)
    assert (told.level, told.subject) == (Level.BAD, "torch")


def test_a_torch_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ASK_S", 0.2)
    told = ask("import time; time.sleep(60)")
    assert isinstance(told, Finding)
    assert "does not load within" in told.text


def test_the_core_of_this_machine_is_asked_and_answers() -> None:
    told = device.survey(["--model", "counting", "--device", "cpu", "--slots", "5"], ENVIRONMENT)
    assert isinstance(told, Survey)
    assert (told.device, told.wanted, told.card, told.refusal, told.slots) == ("cpu", "cpu", None, "", 5)
    assert told.slot_bytes == 4096


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--slots", "0"], "--slots: Expected `int` >= 1"),
        (["--modle", "demo"], "unrecognized arguments: --modle"),
        (["--model", "random:9b"], "there is no model 'random:9b'"),
        (["--device", "cpu", "--state-dtype", "float16"], "is for a GPU; a CPU has float32 states"),
    ],
)
def test_settings_that_the_core_would_refuse_are_told_in_its_words(flags: list[str], reason: str) -> None:
    told = device.survey(flags, ENVIRONMENT)
    assert isinstance(told, Finding)
    assert (told.level, told.subject) == (Level.BAD, "settings")
    assert reason in told.text


def test_torch_is_told_with_the_cuda_that_it_is_built_for() -> None:
    assert device.torch(found()).text == "2.11.0, built for CUDA 13.0"
    assert device.torch(found(cuda="")).text == "2.11.0, built without CUDA"


def test_a_device_that_is_refused_is_a_failure_in_the_cores_words() -> None:
    told = device.device(found(device="", refusal="there is no 'cuda:7': 1 CUDA devices are found"), "580.65.06")
    assert (told.level, told.text) == (Level.BAD, "there is no 'cuda:7': 1 CUDA devices are found")
    assert "--device" in told.remedy


def test_a_card_is_told_with_capability_and_driver() -> None:
    told = device.device(found(device="cuda:1", card=H200), "580.65.06")
    assert told.level is Level.GOOD
    for part in ("cuda:1", "NVIDIA H200", "compute capability 9.0", "(with dependent launches)", "driver 580.65.06"):
        assert part in told.text


def test_a_card_before_9_0_has_no_dependent_launches() -> None:
    card = Card("NVIDIA A100", (8, 0), 1000, 800)
    assert "(without dependent launches)" in device.device(found(device="cuda:0", card=card), None).text


def test_a_cpu_beside_a_gpus_driver_is_a_note_that_says_why() -> None:
    without = device.device(found(cuda=""), "580.65.06")
    blind = device.device(found(), "580.65.06")
    assert without.level is blind.level is Level.NOTE
    assert "torch is built without CUDA" in without.text
    assert "finds no GPU" in blind.text
    assert "CUDA_VISIBLE_DEVICES" in blind.remedy


def test_a_cpu_is_good_where_it_is_chosen_and_where_there_is_nothing_else() -> None:
    assert device.device(found(wanted="cpu"), "580.65.06").level is Level.GOOD
    assert device.device(found(), None).level is Level.GOOD


def test_packages_for_the_gpu_are_named_with_the_extra_that_brings_them() -> None:
    versions = {"triton": "3.6.0", "cuda-bindings": "13.0.3"}
    assert device.gpu_packages(versions.get).text == "triton 3.6.0, cuda-bindings 13.0.3"
    for name in versions:
        told = device.gpu_packages({other: "1" for other in versions if other != name}.get)
        assert (told.level, told.text) == (Level.BAD, f"missing: {name}")
        assert "pip install 'wkvm[gpu]'" in told.remedy


@pytest.mark.parametrize(("utilization", "usable"), [(1.0, 800), (0.9, 700), (0.2, 0), (0.1, 0)])
def test_of_the_gpus_memory_what_is_kept_back_and_what_others_hold_is_left_out(utilization: float, usable: int) -> None:
    told = device.usable_bytes(found(card=H200, gpu_memory_utilization=utilization))
    assert told == pytest.approx(usable, abs=1)


@pytest.mark.parametrize(
    ("told", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12.2.0",
            "550.54.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build\nGCC version: 12", "570.86"),
        ("something else", "unknown"),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(told: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(told)
    assert device.driver_version(tmp_path / "version") == version
    assert device.driver_version(tmp_path / "none") is None


def test_no_command_but_those_that_need_it_loads_torch() -> None:
    program = "import sys, wkvm_frontend.cli.main, wkvm_frontend.cli.doctor; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
