from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from tests.core.daemon.test_hardware import cards
from wkvm_core.daemon.config import CoreConfig
from wkvm_core.daemon.survey import look, main
from wkvm_proto.survey import Card, Survey


def test_a_cpu_is_told_with_a_slot_and_the_weights_of_a_model_without_files() -> None:
    told = look(CoreConfig(model="random:tiny", device="cpu"))
    assert (told.device, told.card, told.refusal) == ("cpu", None, "")
    assert (told.torch, told.cuda) == (torch.__version__, torch.version.cuda or "")
    wide = look(CoreConfig(model="random:tiny", device="cpu", dtype="bfloat16"))
    assert told.weight_bytes == 2 * wide.weight_bytes > 0
    assert told.slot_bytes == wide.slot_bytes


def test_files_tell_their_sizes_themselves() -> None:
    told = look(CoreConfig(model="demo", device="cpu"))
    assert (told.slot_bytes, told.weight_bytes) == (None, 0)


def test_a_card_is_told_with_its_memory_and_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (8, 0), (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    told = look(CoreConfig(model="random:tiny", device="cuda:1", state_dtype="float16"))
    assert (told.device, told.card) == ("cuda:1", Card("Card cuda:1", (9, 0), 1000, 700))
    on_cpu = look(CoreConfig(model="random:tiny", device="cpu"))
    assert 2 * told.weight_bytes == on_cpu.weight_bytes
    assert told.slot_bytes is not None
    assert on_cpu.slot_bytes is not None
    assert told.slot_bytes < on_cpu.slot_bytes


def test_a_device_that_is_refused_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    told = look(CoreConfig(model="counting", device="cuda:3"))
    assert (told.device, told.card) == ("", None)
    assert "there is no 'cuda:3'" in told.refusal


@pytest.mark.parametrize("flags", [["--slots", "0"], ["--model", "random:9b"]])
def test_settings_that_cannot_be_used_end_with_78_and_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_the_program_prints_the_survey_alone() -> None:
    command = [sys.executable, "-m", "wkvm_core.daemon.survey", "--model", "counting", "--device", "cpu"]
    shown = subprocess.run(command, capture_output=True, check=True)
    assert msgspec.json.decode(shown.stdout, type=Survey).slot_bytes == 4096
