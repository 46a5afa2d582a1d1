"""What is built on a CUDA device; the progress of it runs anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.client import Client
from tests.fakes.daemon import Daemon
from wkvm_core.daemon import cuda
from wkvm_core.daemon.cuda import Bar
from wkvm_proto.messages import Stats
from wkvm_proto.names import FinishReason

pytestmark = pytest.mark.timeout(400)  # the first start on a card compiles every kernel

# ---------------------------------------------------------------------------------------------- progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(cuda.time, "monotonic", lambda: now[0])
    return now


def test_the_first_part_is_told_at_once_and_then_one_a_second(clock: list[float]) -> None:
    told: list[str] = []
    bar = Bar(40, told.append)
    for number in range(40):
        bar.next(f"part {number}")
        clock[0] += 0.25
    assert [line.partition("] ")[2] for line in told] == [f"{done}/40: part {done}" for done in range(0, 40, 4)]


def test_the_bar_fills_with_the_parts_that_are_done(clock: list[float]) -> None:
    told: list[str] = []
    bar = Bar(4, told.append)
    for _ in range(4):
        bar.next("a part")
        clock[0] += 2.0
    bar.close()
    shown = [re.search(r"\[(#*)(\.*)\]", line) for line in told]
    assert [(len(found[1]), len(found[2])) for found in shown if found] == [
        (0, 24),
        (6, 18),
        (12, 12),
        (18, 6),
        (24, 0),
    ]


def test_the_last_line_says_how_long_it_took(clock: list[float]) -> None:
    told: list[str] = []
    bar = Bar(1, told.append)
    clock[0] += 3.25
    bar.close()
    assert told == [f"capturing [{'#' * 24}] 1/1 in 3.2 s"]


# ---------------------------------------------------------------------------------------------- a card

FLAGS = ("--device", "cuda", "--model", "random:tiny", "--max-rows", "8", "--step-tokens", "256")
FRACTION = 0.5
VOCAB_SIZE = 512
COMPILE_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*FLAGS, "--gpu-memory-utilization", str(FRACTION), "--host-memory-mb", "64") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    daemon.wait_until_bound(COMPILE_LIMIT_S)
    with Client(daemon.address, [bytes([32 + token % 95]) for token in range(VOCAB_SIZE)]) as client:
        client.hello()
        yield client


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [[1], list(range(1, 120)), [7] * 600], ids=["one", "many", "longer-than-a-step"])
def test_a_core_on_a_card_answers_a_request(client: Client, prompt: list[int]) -> None:
    asked = [client.generate(prompt, max_tokens=9, n=2, seed=seed, temperature=1.0) for seed in (1, 2)]
    client.wait(lambda: all(client.done(request, 2) for request in asked))
    assert not client.failed
    for request in asked:
        for sample in range(2):
            finished = client.finished[request, sample]
            assert finished.prompt_tokens == len(prompt)
            assert finished.generated_tokens == 9 or finished.reason is FinishReason.STOP_TOKEN
            assert len(client.tokens.get((request, sample), [])) == finished.delivered_tokens
            assert all(token < VOCAB_SIZE for token in client.tokens.get((request, sample), []))


@pytest.mark.gpu
def test_slots_and_all_else_fit_into_the_part_of_the_memory_that_is_given(client: Client) -> None:
    assert client.welcome is not None
    card = client.welcome.card
    client.wait(lambda: client.find(Stats) is not None)
    held = [client.gauge(f"wkvm_device_{tag}_bytes") for tag in ("weights", "lanes", "graphs", "states")]
    _, total = torch.cuda.mem_get_info()
    assert card.num_slots * card.slot_bytes <= held[-1]
    assert sum(held) <= FRACTION * total


@pytest.mark.gpu
def test_more_slots_than_fit_end_with_78_and_the_number_that_does(tmp_path: Path) -> None:
    places = ["--store", str(tmp_path / "store"), "--socket", f"ipc://{tmp_path / 's'}"]
    command = [sys.executable, "-m", "wkvm_core", *FLAGS, *places, "--slots", str(2**24)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
    assert result.returncode == 78, result.stderr
    assert re.search(r"16777216 slots of \d+ bytes do not fit: there is room for \d+", result.stderr)
