"""The real programs, end to end: `wkvm serve` over the counting model, asked, killed, loaded, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.counting import greedy
from tests.frontend.cli.test_serve import ROOT, gone, until


class RealServe:
    """`wkvm serve` on a free port."""

    def __init__(self, folder: Path, *, model: str = "counting", frontends: int = 2) -> None:
        flags = ("--model", model, "--port", "0", "--frontends", str(frontends), "--store", str(folder / "store"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wkvm_frontend.cli.main", "serve", *flags],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    @property
    def url(self) -> str:
        def found() -> str | None:
            return next(
                (m[1] for line in list(self.lines) if (m := re.search(r"ready after .* at (\S+)$", line))), None
            )

        return until(found, lambda: "\n".join(self.lines))

    def children(self) -> list[int]:
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self, how: signal.Signals) -> int:
        self._process.send_signal(how)
        code = self._process.wait(20)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self.end(signal.SIGKILL)


@pytest.fixture
def real() -> Iterator[RealServe]:
    with tempfile.TemporaryDirectory(prefix="wkvm-test-") as folder:
        serve = RealServe(Path(folder))
        try:
            yield serve
        finally:
            serve.close()


def complete(url: str, prompt: str, tokens: int) -> str:
    body = {"model": "counting", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


def test_a_served_model_answers_is_measured_survives_its_core_and_ends_in_order(
    real: RealServe, tmp_path: Path
) -> None:
    expected = bytes(greedy(b"to be counted", 40)).decode()
    assert complete(real.url, "to be counted", 40) == expected

    file = tmp_path / "out.json"
    flags = ("--requests", "24", "--concurrency", "8", "--output-tokens", "32", "--ignore-eos", "--workers", "2")
    bench = [sys.executable, "-m", "wkvm_frontend.cli.main", "bench", "serve", "--url", real.url, "--json", str(file)]
    subprocess.run([*bench, *flags], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=30)
    found = json.loads(file.read_text())["figures"]
    assert (found["completed"], found["failed"], found["output_tokens"]) == (24, 0, 24 * 32)
    assert found["prompt_tokens"] > 24 * 100

    core, *frontends = real.children()
    os.kill(core, signal.SIGKILL)
    until(lambda: any("ready again" in line for line in list(real.lines)), lambda: "\n".join(real.lines))
    assert complete(real.url, "to be counted", 40) == expected
    again = real.children()
    assert set(frontends) < set(again)

    assert real.end(signal.SIGTERM) == 0
    assert all(map(gone, again))


def test_a_model_of_random_weights_is_served_and_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with tempfile.TemporaryDirectory(prefix="wkvm-test-") as folder:
        real = RealServe(Path(folder), model="random:tiny", frontends=1)
        try:
            flags = ("--url", real.url, "--endpoint", "completions", "--requests", "6", "--concurrency", "3")
            flags += ("--input-tokens", "16", "--output-tokens", "12", "--ignore-eos", "--json", str(file))
            bench = [sys.executable, "-m", "wkvm_frontend.cli.main", "bench", "serve", *flags]
            subprocess.run(bench, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=30)
        finally:
            real.close()
    document = json.loads(file.read_text())
    assert document["settings"]["model"] == "random:tiny"
    found = document["figures"]
    assert (found["completed"], found["output_tokens"]) == (6, 6 * 12)
    assert found["itl_ms"]["count"] > 0
