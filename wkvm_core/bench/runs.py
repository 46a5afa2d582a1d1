"""Runs on one engine, one after another: nothing of a run is left when the next one begins."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wkvm_core.bench.figures import TooShort, decode_figures, prefill_seconds, steady
from wkvm_core.bench.parts import measured
from wkvm_core.daemon.boot import Engine
from wkvm_core.daemon.memory import resident_bytes

_LOOK_S = 0.0001
_QUIET_S = 0.03
"""An engine with nothing to do for so long has nothing on its way to it either."""
_END_S = 5.0

Caller = subprocess.Popen[str]


class RunFailed(Exception):
    """A run has no result; the message says why."""


@dataclass(frozen=True)
class Decode:
    """Requests that run side by side."""

    rows: int
    tokens: int
    prompt: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1
    seconds: float = 0.0
    """Least time to measure: they get more tokens if need be."""
    flood: int = 0
    """Tokens of the prompts that load meanwhile, one after another; 0 = none."""


@dataclass(frozen=True)
class Prefill:
    """Prompts that come at once, for one output token each."""

    rows: int
    tokens: int
    rounds: int
    seed: int = 1

    @property
    def shape(self) -> str:
        """As it is asked for."""
        return f"{self.rows}x{self.tokens}"


class Runs:
    """Drives the loop of an engine in this thread while callers, processes of their own, send it requests."""

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._parts = measured(engine)

    def decode(self, load: Decode) -> dict[str, Any]:
        """One batch size; times in microseconds. Raises RunFailed."""
        arguments = ["--rows", load.rows, "--tokens", load.tokens, "--prompt", load.prompt, "--seed", load.seed]
        arguments += ["--temperature", load.temperature, "--top-p", load.top_p, "--seconds", load.seconds]
        with self._run():
            flooding = [self._flood(load.flood)] if load.flood else []
            try:
                said = self._called("decode", arguments, load.rows)
            finally:
                for caller in flooding:
                    _end(caller)
            window = self._window(load.rows, said)
            return {
                "rows": load.rows,
                "temperature": load.temperature,
                "top_p": load.top_p,
                "flood": load.flood,
                **decode_figures(window),
                **{name: value for name, value in said.items() if name not in ("began", "ended")},
                **memory(),
                "measured_at": time.time(),
            }

    def prefill(self, load: Prefill) -> dict[str, Any]:
        """One shape of prompts: the median round. Raises RunFailed."""
        arguments = ["--rows", load.rows, "--prompt", load.tokens, "--rounds", load.rounds, "--seed", load.seed]
        with self._run():
            said = self._called("prefill", arguments, load.rows)
            try:
                times = [prefill_seconds(self._parts.turns, began, ended) for began, ended in said.pop("rounds")]
            except TooShort as short:
                raise RunFailed(f"prefill {load.shape}: {short}") from None
            seconds = statistics.median(times)
            return {
                "prefill": load.shape,
                "tokens_per_s": load.rows * load.tokens / seconds,
                "seconds": seconds,
                "rounds": len(times),
                **said,
                **memory(),
                "measured_at": time.time(),
            }

    @contextlib.contextmanager
    def _run(self) -> Iterator[None]:
        self._parts.clear()
        try:
            yield
        finally:
            self._drain()

    def _window(self, rows: int, said: dict[str, Any]) -> Sequence[Any]:
        try:
            return steady(self._parts.turns, rows, said["began"], said["ended"])
        except TooShort as short:
            raise RunFailed(f"{rows} rows: {short}") from None

    def _called(self, work: str, arguments: list[Any], rows: int) -> dict[str, Any]:
        """What a caller found. An idle engine lets its requests gather until all are there, so that they begin
        together."""
        caller = self._start(work, arguments)
        try:
            while caller.poll() is None:
                self._turn(rows)
            said, _ = caller.communicate()
        finally:
            _end(caller)
        if caller.returncode:
            raise RunFailed(f"{rows} rows: the caller ended with code {caller.returncode}")
        found: dict[str, Any] = json.loads(said)
        return found

    def _flood(self, tokens: int) -> Caller:
        """A caller whose prompt is being read."""
        caller = self._start("flood", ["--prompt", tokens])
        try:
            while not self._engine.scheduler.num_requests:
                if caller.poll() is not None:
                    raise RunFailed(f"flood of {tokens} tokens: the caller ended with code {caller.returncode}")
                self._turn(1)
        except BaseException:
            _end(caller)
            raise
        return caller

    def _start(self, work: str, arguments: list[Any]) -> Caller:
        command = [sys.executable, "-m", "wkvm_core.bench.caller", "--address", self._address, "--work", work]
        return subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=os.environ)

    def _turn(self, together: int) -> None:
        """A turn of the loop; when it has nothing to run, only once so many items wait for it."""
        scheduler = self._engine.scheduler
        if not (scheduler.num_requests or scheduler.in_flight) and self._engine.inbox.waiting < together:
            time.sleep(_LOOK_S)
            return
        self._engine.loop.turn()
        self._parts.end_turn(self._engine.mail.cpu_s)

    def _drain(self) -> None:
        """Until nothing is left to do."""
        scheduler, inbox = self._engine.scheduler, self._engine.inbox
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + _QUIET_S:
            if scheduler.num_requests or scheduler.in_flight or inbox.waiting:
                quiet_since = time.monotonic()
            self._turn(1)


def memory() -> dict[str, float]:
    """Of this process, and of the device by everybody, MiB."""
    found = {"resident_mib": resident_bytes() / 2**20}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info()
        found["device_mib"] = (total - free) / 2**20
    return found


def _end(caller: Caller) -> None:
    """It says goodbye; the engine goes on afterwards. One that does not end is killed."""
    caller.terminate()
    try:
        caller.wait(_END_S)
    except subprocess.TimeoutExpired:
        caller.kill()
        caller.wait()
    if caller.stdout is not None:
        caller.stdout.close()
