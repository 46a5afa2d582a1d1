"""One program under a supervisor: started, heard, ended, started again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from wkvm_frontend.cli.lifeline import dies_with_parent

FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 15.0
STEADY_S = 30.0
"""A program that lived so long begins again without delay."""


class Child:
    """Runs a command again and again. It gets no terminal signals, and the kernel ends it with its parent."""

    def __init__(self, name: str, command: Sequence[str], hear: Callable[[str], None], pass_fds: Sequence[int]) -> None:
        self.name = name
        self._command = command
        self._hear = hear
        self._pass_fds = pass_fds
        self._process: asyncio.subprocess.Process | None = None
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> int:
        """Starts it once and waits; its output, line by line with its name, is heard. The exit code, negative for a
        signal. Raises OSError when it cannot be started."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=self._pass_fds,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        self._process = process
        assert process.stdout is not None
        try:
            await self._listen(process.stdout)
            code = await process.wait()
        finally:
            self._process = None
        self._failures = 0 if loop.time() - begun >= STEADY_S else self._failures + 1
        return code

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(65536):
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._say(line)
        self._say(rest)

    def _say(self, line: bytes) -> None:
        if line.strip():
            self._hear(f"{self.name} | {line.decode('utf-8', 'replace').rstrip()}")

    @property
    def failures(self) -> int:
        """Ends in a row, each soon after its start."""
        return self._failures

    @property
    def delay_s(self) -> float:
        """Before the next start."""
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** max(0, self._failures - 1)) if self._failures else 0.0

    def send(self, how: signal.Signals) -> None:
        """A signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)


def manner(code: int) -> str:
    """How a program ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
