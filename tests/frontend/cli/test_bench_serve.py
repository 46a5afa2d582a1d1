from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.openai_server import FakeServer, fake_server
from wkvm_frontend.cli.main import main


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def bench(server: FakeServer, file: Path, *flags: str) -> tuple[int, dict[str, object]]:
    """Exit code and figures of a run."""
    code = main(["bench", "serve", "--url", server.url, "--json", str(file), *flags])
    return code, json.loads(file.read_text())["figures"]


def streams(server: FakeServer) -> list[dict[str, object]]:
    return [request for request in server.requests if request.get("stream")]


def test_every_request_is_sent_and_counted(
    server: FakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--concurrency", "3", "--requests", "8", "--output-tokens", "6", "--warmup", "2", "--workers", "2")
    code, found = bench(server, tmp_path / "out.json", *flags, "--ignore-eos", "--input-tokens", "64")
    assert code == 0
    assert (found["requests"], found["completed"], found["output_tokens"]) == (8, 8, 48)
    assert found["itl_ms"]["count"] == 8 * 5  # type: ignore[index]
    assert found["ttft_ms"]["p50"] > 0.0  # type: ignore[index]
    sent = streams(server)
    assert len(sent) == 10
    assert all(request["max_tokens"] == 6 and request["ignore_eos"] is True for request in sent)
    assert len({json.dumps(request["messages"]) for request in sent}) == 10
    shown = capfd.readouterr()
    assert "TPOT" in shown.out
    assert "2 load process(es)" in shown.err


def test_prompts_are_as_long_as_the_server_counts_them(server: FakeServer, tmp_path: Path) -> None:
    _, found = bench(server, tmp_path / "out.json", "--concurrency", "2", "--requests", "4", "--input-tokens", "99")
    assert found["prompt_tokens"] == 4 * 99  # 7 around, 2 a word
    assert len(streams(server)[-1]["messages"][0]["content"].split()) == 46  # type: ignore[index]


def test_connections_are_used_again(server: FakeServer, tmp_path: Path) -> None:
    before = server.connections
    bench(server, tmp_path / "out.json", "--concurrency", "2", "--requests", "20", "--output-tokens", "2")
    assert server.connections - before <= 3 + 2  # three questions before the load


def test_a_server_that_closes_each_connection_is_no_failure(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--model", "closes", "--concurrency", "2", "--requests", "6", "--output-tokens", "3")
    code, found = bench(server, tmp_path / "out.json", *flags)
    assert (code, found["completed"]) == (0, 6)


def test_later_turns_carry_what_was_answered(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--concurrency", "1", "--requests", "2", "--turns", "3", "--output-tokens", "2", "--warmup", "0")
    code, found = bench(server, tmp_path / "out.json", *flags)
    assert (code, found["completed"]) == (0, 6)
    third = streams(server)[2]["messages"]
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]  # type: ignore[attr-defined]
    assert third[1]["content"] == 'w0 "text": "content":"w1 "text": "content":"'  # type: ignore[index]


def test_completions_are_asked_with_a_prompt(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--endpoint", "completions", "--requests", "2", "--turns", "2", "--output-tokens", "3", "--warmup", "0")
    code, found = bench(server, tmp_path / "out.json", *flags, "--concurrency", "1")
    assert (code, found["output_tokens"]) == (0, 12)
    first, second = (str(request["prompt"]) for request in streams(server)[:2])
    assert second.startswith(first + "w0")


def test_requests_arrive_at_the_rate_until_the_duration_is_over(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--rate", "200", "--duration", "0.5", "--output-tokens", "2", "--workers", "2", "--seed", "3")
    code, found = bench(server, tmp_path / "out.json", *flags)
    assert code == 0
    assert 50 < found["completed"] < 160  # type: ignore[operator]


def test_tokens_that_come_in_one_piece_all_count(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--model", "together", "--requests", "2", "--concurrency", "1", "--output-tokens", "40")
    _, found = bench(server, tmp_path / "out.json", *flags)
    assert found["output_tokens"] == 80
    assert found["itl_ms"]["count"] == 78  # type: ignore[index]
    assert found["itl_ms"]["p50"] == 0.0  # type: ignore[index]


def test_a_server_that_does_not_count_is_said_so(
    server: FakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", "uncounted", "--requests", "2", "--concurrency", "1", "--output-tokens", "4")
    code, found = bench(server, tmp_path / "out.json", *flags, "--input-tokens", "30")
    assert (code, found["output_tokens"]) == (0, 8)
    assert "does not count" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("refuses", "http 429 queue_full"),
        ("breaks", "error event numerical_error"),
        ("cuts", "connection closed"),
        ("silent", "timeout"),
    ],
)
def test_failures_are_told_by_kind_and_failures_alone_exit_with_one(
    server: FakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, kind: str
) -> None:
    flags = ("--model", model, "--requests", "3", "--concurrency", "3", "--timeout", "0.4", "--warmup", "0")
    code, found = bench(server, tmp_path / "out.json", *flags)
    assert (code, found["completed"], found["failures"]) == (1, 0, {kind: 3})
    assert f"3 x {kind}" in capfd.readouterr().out


def test_the_key_is_sent_and_not_written_down(server: FakeServer, tmp_path: Path) -> None:
    bench(server, tmp_path / "out.json", "--api-key", "sk-secret", "--requests", "1", "--output-tokens", "1")
    assert all("Bearer sk-secret" in head for head in server.heads)
    assert "secret" not in (tmp_path / "out.json").read_text()


def test_a_server_that_is_not_there_is_said_plainly(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 1
    assert "refused" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--url", "ftp://x"], "not an http address"),
        (["--concurrency", "2", "--rate", "3"], "give one of them"),
        (["--requests", "-1"], "--requests"),
        (["--endpoint", "images"], "--endpoint"),
    ],
)
def test_bad_settings_exit_with_two(flags: list[str], word: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert word in capfd.readouterr().err
