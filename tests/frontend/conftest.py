"""A real `wkvm-api` process on a real port, and the core behind it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.fakes.scripted_core import BYTE_CARD, ScriptedCore, counting

StartApi = Callable[..., "Api"]


class Api:
    """A running `wkvm-api`."""

    def __init__(self, uris: list[str], flags: tuple[str, ...]) -> None:
        cores = [part for uri in uris for part in ("--core", uri)]
        # A file takes the log: a full pipe would stop the process.
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wkvm_frontend", *cores, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("wkvm-api listening on "), line
        self.url = line.split()[-1]
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.address = (host, int(port))
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def wait_ready(self) -> Api:
        """Returns once it is ready."""
        deadline = time.monotonic() + 15
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.02)
        return self

    def close(self) -> None:
        """Ends it."""
        self.http.close()
        self.process.kill()
        self.process.wait(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@pytest.fixture(scope="session")
def _shared() -> Iterator[tuple[ScriptedCore, Api]]:
    with tempfile.TemporaryDirectory() as folder:
        core = ScriptedCore(Path(folder)).open()
        api = Api([core.uri], ("--keep-alive-s", "0.3", "--body-timeout-s", "1", "--header-timeout-s", "1"))
        try:
            yield core, api.wait_ready()
        finally:
            api.close()
            core.close()


@pytest.fixture
def core(_shared: tuple[ScriptedCore, Api]) -> ScriptedCore:
    """The core behind `api`, as after its start: it counts."""
    core = _shared[0]
    core.script = counting
    core.step_s = core.first_token_s = 0.0
    core.refuse = core.fail_after = core.stats = None
    core.silent = core.loop_hangs = False
    core.requests.clear()
    core.cancelled.clear()
    return core


@pytest.fixture
def api(_shared: tuple[ScriptedCore, Api], core: ScriptedCore) -> Api:
    """A server that many tests share."""
    return _shared[1]


@pytest.fixture
def http(api: Api) -> httpx.Client:
    """A client of `api`."""
    return api.http


@pytest.fixture
def start_api() -> Iterator[StartApi]:
    """Starts servers of the test's own, and ends them."""
    started: list[Api] = []

    def start(*uris: str, flags: tuple[str, ...] = ()) -> Api:
        started.append(Api(list(uris), flags))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def own_core() -> Iterator[ScriptedCore]:
    """A core that the test may kill."""
    with tempfile.TemporaryDirectory() as folder:
        core = ScriptedCore(Path(folder), BYTE_CARD).open()
        yield core
        core.close()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server before a real core with the embedded model."""
    folder: Path = tmp_path_factory.mktemp("core")
    start = "from wkvm_core.daemon.main import main; main()"
    flags = ["--model", "demo", "--store", str(folder / "store"), "--socket", str(folder / "s"), "--threads", "1"]
    core = subprocess.Popen([sys.executable, "-c", start, *flags], stderr=subprocess.DEVNULL)
    api = Api([f"ipc://{folder}/s"], ())
    try:
        yield api.wait_ready()
    finally:
        api.close()
        core.kill()
        core.wait(10)
