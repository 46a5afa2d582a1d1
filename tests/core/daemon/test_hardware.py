from __future__ import annotations

import sys

import pytest
import torch

from wkvm_core.daemon.config import CoreConfig
from wkvm_core.daemon.hardware import Cpu, find_device, find_hardware, refused_when_full
from wkvm_core.errors import Refused
from wkvm_proto.names import ErrorCode


def cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """As if torch found these."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")


def refusal(wanted: str) -> str:
    with pytest.raises(Refused) as error:
        find_hardware(CoreConfig(device=wanted))
    assert (error.value.code, error.value.param) == (ErrorCode.BAD_CONFIG, "device")
    return str(error.value)


@pytest.mark.parametrize(
    "wanted",
    ["", "gpu", "nonsense", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0:1", "cuda:1 ", "mps", "meta"],
)
def test_what_names_no_device_is_refused_with_what_does(wanted: str) -> None:
    assert f"devices are auto, cpu, cuda and cuda:N, not {wanted!r}" in refusal(wanted)


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7", "cuda:256", "cuda:99999999999999999999"])
def test_a_card_is_refused_where_there_is_none(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    assert f"there is no {wanted!r}: 0 CUDA devices are found" in refusal(wanted)


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:7", "cuda:255", "cuda:256"])
def test_a_card_beyond_the_last_one_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (9, 0), (9, 0))
    assert f"there is no {wanted!r}: 2 CUDA devices are found" in refusal(wanted)


@pytest.mark.parametrize("wanted", ["cuda:1", "auto"])
def test_a_card_that_is_too_old_is_refused_with_its_name(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (7, 5), (7, 0))
    told = refusal(wanted)
    assert "has compute capability 7." in told
    assert "need 8.0" in told
    assert "--device cpu" in told


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:01", "cuda:1"), ("cpu", "cpu")],
)
def test_a_device_that_is_there_is_found(wanted: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (9, 0), (8, 0))
    assert find_device(wanted) == torch.device(found)


def test_auto_is_the_cpu_where_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    assert isinstance(find_hardware(CoreConfig()), Cpu)


def test_a_card_without_the_packages_it_takes_is_refused_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (9, 0))
    for name in [name for name in sys.modules if name.endswith(".gpu") or name == "wkvm_core.daemon.cuda"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("wkvm_core.exec.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # whoever imports it now fails
    told = refusal("cuda")
    assert "triton" in told
    assert "`gpu` extra" in told


def test_too_little_memory_of_a_gpu_is_a_refusal_in_one_sentence() -> None:
    with pytest.raises(Refused, match=r"memory is too small: CUDA out of memory$") as error, refused_when_full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total")
    assert error.value.code is ErrorCode.NOT_ENOUGH_MEMORY
