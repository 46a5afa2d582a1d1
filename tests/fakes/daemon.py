"""A real wkvm-core process for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.client import Client

START_LIMIT_S = 60.0


class Daemon:
    """`python -m wkvm_core` in a folder of its own."""

    def __init__(self, *flags: str, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
        # Not pytest's folder: a socket's path is short.
        self._temporary = tempfile.TemporaryDirectory(prefix="wkvm-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary is not None else folder
        assert self.folder is not None
        self.socket = self.folder / "core.sock"
        self.log = self.folder / "core.log"
        self.flags = flags
        self.environment = environment or {}
        self.start()

    @property
    def address(self) -> str:
        return f"ipc://{self.socket}"

    def start(self) -> None:
        """Starts the process; with the same folder it is the same core again."""
        self.socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "wkvm_core", "--store", str(self.folder / "store"), "--socket", self.address]
        if "--model" not in self.flags:
            command += ["--model", "counting"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], stderr=log, stdout=log, env=os.environ | self.environment
            )

    def wait_until_bound(self, limit_s: float = START_LIMIT_S) -> None:
        """The socket is there."""
        end = time.monotonic() + limit_s
        while not self.socket.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def client(self) -> Client:
        """A frontend that has said hello."""
        self.wait_until_bound()
        client = Client(self.address)
        client.hello()
        return client

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Ends it, however it is."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
