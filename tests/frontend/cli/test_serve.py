from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from wkvm_frontend.cli.serve import split_flags
from wkvm_proto.settings import BadSettings

ROOT = Path(__file__).parents[3]
WITHIN_S = 15.0
T = TypeVar("T")


class Serving:
    """`wkvm serve` in a process, over stand-in programs, with all that it says."""

    def __init__(self, runtime: Path, *flags: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WKVM_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.stand_in_serve", *flags],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(runtime)} | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    def said(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The match in the line that says it for the n-th time, once it does."""

        def found() -> re.Match[str] | None:
            matches = [match for line in list(self.lines) if (match := re.search(pattern, line))]
            return matches[times - 1] if len(matches) >= times else None

        return until(found, lambda: f"{pattern!r} was not said in {self.lines}")

    def pid_of(self, name: str, times: int = 1) -> int:
        return int(self.said(rf"^{name} \| pid (\d+)", times)[1])

    @property
    def url(self) -> str:
        return self.said(r"^wkvm \| ready after .* at (http://\S+)/v1$")[1]

    def ended(self) -> int:
        code = self.process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


def until(ask: Callable[[], T | None], why: Callable[[], str]) -> T:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(why())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wkvm-test-") as folder:
        yield Path(folder)


@pytest.fixture
def serving(runtime: Path) -> Iterator[Callable[..., Serving]]:
    begun: list[Serving] = []

    def begin(*flags: str, **variables: str) -> Serving:
        begun.append(Serving(runtime, *flags, **variables))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def test_it_tells_the_address_once_a_request_would_succeed_and_ends_in_order(
    serving: Callable[..., Serving], runtime: Path
) -> None:
    one = serving("--model", "steady", "--port", "0", "--frontends", "2")
    with urllib.request.urlopen(one.url + "/v1/models") as answer:
        assert b"steady" in answer.read()
    pids = [one.pid_of("core"), one.pid_of("api-1"), one.pid_of("api-2")]
    (folder,) = runtime.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 0
    assert all(map(gone, pids))
    assert not list(runtime.iterdir())


def test_ctrl_c_ends_with_zero(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "steady", "--port", "0")
    assert one.url
    one.process.send_signal(signal.SIGINT)
    assert one.ended() == 0


def test_the_second_ctrl_c_ends_programs_that_will_not_end(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "stubborn", "--port", "0", "--drain-s", "600")
    assert one.url
    core = one.pid_of("core")
    one.process.send_signal(signal.SIGINT)
    one.said("stopping")
    assert not gone(core)
    one.process.send_signal(signal.SIGINT)
    assert one.ended() == 0
    assert gone(core)


def test_a_killed_core_comes_back_and_the_frontends_stay(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "steady", "--port", "0")
    assert one.url
    api = one.pid_of("api-1")
    os.kill(one.pid_of("core"), signal.SIGKILL)
    one.said("core was ended by SIGKILL; it starts again")
    one.said("ready again")
    assert not gone(one.pid_of("core", 2))
    assert not gone(api)


def test_a_killed_frontend_comes_back_on_the_same_port(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "steady", "--port", "0")
    url, core, api = one.url, one.pid_of("core"), one.pid_of("api-1")
    os.kill(api, signal.SIGKILL)
    until(lambda: gone(api), lambda: "the killed frontend lives")
    # The supervisor holds the socket: the connection waits in it.
    with urllib.request.urlopen(url + "/metrics", timeout=WITHIN_S) as answer:
        assert int(answer.read().split()[1]) == one.pid_of("api-1", 2)
    assert not gone(core)


def test_a_core_that_refuses_its_settings_is_heard_and_not_started_again(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "refuses", "--port", "0")
    assert one.ended() == 78
    assert "core | error: no such model" in one.lines
    assert sum(line.startswith("core | flags") for line in one.lines) == 1
    assert not any("ready after" in line for line in one.lines)


def test_a_core_that_never_works_is_given_up(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "crashes", "--port", "0")
    assert one.ended() == 70
    assert sum(line.startswith("core | flags") for line in one.lines) == 5


def test_a_port_in_use_is_said_plainly(serving: Callable[..., Serving]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        one = serving("--model", "steady", "--port", str(port))
        assert one.ended() == 1
    assert one.lines == [
        f"wkvm serve: port {port} of 127.0.0.1 is taken by another program; choose one with --port",
    ]


def test_nothing_outlives_a_killed_supervisor(serving: Callable[..., Serving]) -> None:
    one = serving("--model", "steady", "--port", "0", "--frontends", "2")
    assert one.url
    pids = [one.pid_of("core"), one.pid_of("api-1"), one.pid_of("api-2")]
    one.process.kill()
    until(lambda: all(map(gone, pids)), lambda: "children outlive their supervisor")


def test_variables_and_flags_reach_the_programs_that_know_them(serving: Callable[..., Serving]) -> None:
    flags = ("--slots", "7", "--step-tokens", "99", "--max-headers=50", "--access-log", "--deterministic")
    one = serving(*flags, WKVM_MODEL="steady", WKVM_PORT="0", WKVM_STORE="/some/store", WKVM_FRONTENDS="1")
    core, api = one.said(r"^core \| flags (.*)")[1], one.said(r"^api-1 \| flags (.*)")[1]
    assert "--model steady" in core
    assert "--store /some/store --slots 7 --step-tokens 99 --deterministic" in core
    assert api.endswith("--max-headers=50 --access-log")
    assert one.url


def test_flags_are_split_by_the_program_that_knows_them() -> None:
    flags = ["--port", "9", "--no-access-log", "--threads", "2", "--config", "a.toml", "--log-level=debug", "--no-x"]
    own, core, api = split_flags(flags)
    assert own == ["--port", "9", "--config", "a.toml"]
    assert core == ["--threads", "2", "--no-x"]
    assert api == ["--no-access-log", "--log-level=debug"]


@pytest.mark.parametrize("flags", [["demo"], ["--port", "1", "2"], ["--socket", "/x"], ["--fd=3"], ["--no-reuse-port"]])
def test_what_is_no_flag_or_not_the_callers_to_set_is_refused(flags: list[str]) -> None:
    with pytest.raises(BadSettings):
        split_flags(flags)
