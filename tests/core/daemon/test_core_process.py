from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.client import BYTES, Client
from tests.fakes.counting import greedy
from tests.fakes.daemon import Daemon
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Generate,
    Goodbye,
    Hello,
    Junction,
    Ping,
    Stats,
    Vocabulary,
    Welcome,
)
from wkvm_proto.names import ErrorCode, FinishReason
from wkvm_proto.sampling import Sampling
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_message


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--slots", "8", "--max-rows", "8", "--lease-s", "1.5", "--max-prompt-tokens", "5000") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def answer(client: Client, request: int) -> list[int]:
    client.wait(lambda: client.done(request))
    assert request in {number for number, _ in client.finished}, client.failed
    return client.tokens.get((request, 0), [])


def test_a_request_is_accepted_generates_and_finishes(client: Client) -> None:
    request = client.generate([1, 2, 3], max_tokens=12)
    assert answer(client, request) == greedy([1, 2, 3], 12)
    assert client.accepted[request].prompt_tokens == 3
    finished = client.finished[request, 0]
    assert (finished.reason, finished.generated_tokens, finished.delivered_tokens) == (FinishReason.LENGTH, 12, 12)
    assert (finished.prompt_tokens, finished.consumed_tokens) == (3, 14)


def test_samples_come_under_their_index(client: Client) -> None:
    request = client.generate([1, 2, 3], n=5, max_tokens=6, temperature=1.0, seed=3)
    client.wait(lambda: client.done(request, 5))
    assert all(len(client.tokens[request, sample]) == 6 for sample in range(5))


def test_a_text_stop_ends_before_its_first_byte(client: Client) -> None:
    tokens = greedy([4, 4], 40)
    stop = bytes(tokens[10:13])
    request = client.generate([4, 4], max_tokens=40, stop_texts=(stop, b"\x01never"))
    assert answer(client, request) == tokens[:10]
    assert client.finished[request, 0].reason is FinishReason.STOP_TEXT
    assert client.finished[request, 0].stop_text == stop


def test_a_kept_state_is_started_from_by_its_handle_and_by_its_name(client: Client) -> None:
    first = client.generate([1], max_tokens=5, save_as="chat.1")
    line = [1, *answer(client, first)]
    handle = client.finished[first, 0].saved_as
    name, _, version = handle.partition("@")
    assert name == "chat.1"
    assert int(version) >= 1
    for state in (handle, "chat.1"):
        second = client.generate([7], max_tokens=5, state=state)
        assert answer(client, second) == greedy([*line, 7], 5)
        assert client.accepted[second].reused_tokens == 6
        assert client.accepted[second].prompt_tokens == 7


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": b""}, ErrorCode.BAD_REQUEST, "prompt"),
        ({"prompt": b"abc"}, ErrorCode.BAD_REQUEST, "prompt"),
        ({"prompt": pack_u32([256])}, ErrorCode.TOKEN_OUT_OF_RANGE, "prompt"),
        ({"prompt": pack_u32([2**32 - 1])}, ErrorCode.TOKEN_OUT_OF_RANGE, "prompt"),
        ({"prompt": pack_u32([1] * 5001)}, ErrorCode.PROMPT_TOO_LONG, "prompt"),
        ({"tenant": ""}, ErrorCode.BAD_REQUEST, "tenant"),
        ({"adapter": 1}, ErrorCode.BAD_REQUEST, "adapter"),
        ({"state": "nothing"}, ErrorCode.STATE_NOT_FOUND, "state"),
        ({"state": "../etc/passwd"}, ErrorCode.BAD_REQUEST, "state"),
        ({"state": "x@0"}, ErrorCode.BAD_REQUEST, "state"),
        ({"save_as": "a b"}, ErrorCode.BAD_REQUEST, "save_as"),
        ({"save_as": "ok", "n": 2}, ErrorCode.BAD_REQUEST, "n"),
        ({"junctions": (Junction(2), Junction(1))}, ErrorCode.BAD_REQUEST, "junctions"),
        ({"junctions": (Junction(9),)}, ErrorCode.BAD_REQUEST, "junctions"),
        ({"sampling": Sampling(max_tokens=2, min_tokens=3)}, ErrorCode.BAD_REQUEST, "min_tokens"),
        ({"sampling": Sampling(max_tokens=2**31 - 1)}, ErrorCode.BAD_REQUEST, "max_tokens"),
        (
            {"sampling": Sampling(max_tokens=2, stop_ids=pack_u32([300]))},
            ErrorCode.TOKEN_OUT_OF_RANGE,
            "stop_token_ids",
        ),
        (
            {"sampling": Sampling(max_tokens=2, bias_ids=pack_u32([256]), bias_values=pack_f32([1.0]))},
            ErrorCode.TOKEN_OUT_OF_RANGE,
            "logit_bias",
        ),
        ({"sampling": Sampling(max_tokens=2, bias_ids=pack_u32([2]))}, ErrorCode.BAD_REQUEST, "logit_bias"),
        (
            {"sampling": Sampling(max_tokens=2, bias_ids=pack_u32([2, 2]), bias_values=pack_f32([1.0, 2.0]))},
            ErrorCode.BAD_REQUEST,
            "logit_bias",
        ),
        (
            {"sampling": Sampling(max_tokens=2, bias_ids=pack_u32([2]), bias_values=pack_f32([float("inf")]))},
            ErrorCode.BAD_REQUEST,
            "logit_bias",
        ),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_by_field(client: Client, fields, code, param) -> None:
    given = {"prompt": pack_u32([1]), "sampling": Sampling(max_tokens=2), "tenant": "dev"} | fields
    client.send(Generate(request=900, **given))
    client.wait(lambda: 900 in client.failed)
    failed = client.failed[900]
    assert (failed.code, failed.param) == (code, param)


@pytest.mark.parametrize("temperature", [-1.0, 1e9, float("nan"), float("inf")])
def test_out_of_range_numbers_make_a_frame_no_message(client: Client, temperature: float) -> None:
    client.send(Generate(1, "dev", pack_u32([1]), Sampling(max_tokens=2, temperature=temperature)))
    refusal = client.refused(ErrorCode.BAD_FRAME)
    assert "temperature" in refusal.message


def test_a_number_in_use_is_refused_and_the_first_request_goes_on(client: Client) -> None:
    request = client.generate([1, 2], max_tokens=3000, temperature=0.0)
    client.wait(lambda: request in client.accepted)
    client.send(Generate(request, "dev", pack_u32([5]), Sampling(max_tokens=2)))
    client.wait(lambda: request in client.failed)
    assert client.failed.pop(request).code is ErrorCode.DUPLICATE_REQUEST
    assert answer(client, request) == greedy([1, 2], 3000)


def test_cancel_is_answered_by_a_finish_and_an_unknown_number_by_nothing(client: Client) -> None:
    request = client.generate([1], n=3, max_tokens=100_000)
    client.wait(lambda: (request, 0) in client.tokens)
    client.cancel(12345)
    client.cancel(request)
    client.wait(lambda: client.done(request, 3))
    assert {client.finished[request, sample].reason for sample in range(3)} == {FinishReason.CANCELLED}


def test_a_deadline_is_a_typed_failure(client: Client) -> None:
    request = client.generate([1], max_tokens=1_000_000, timeout_s=0.3)
    client.wait(lambda: client.done(request))
    assert client.failed[request].code is ErrorCode.DEADLINE


def test_the_protocol_version_and_the_vocabulary_are_checked(daemon: Daemon, client: Client) -> None:
    with Client(daemon.address, [*BYTES[:-1], b"?"]) as other:
        other.send(Hello(PROTOCOL + 1, "future", 1))
        other.refused(ErrorCode.PROTOCOL_MISMATCH)
        other.events.clear()
        other.send(Hello(PROTOCOL, "other", 1, vocabulary_digest(other.vocabulary)))
        other.refused(ErrorCode.VOCABULARY_MISMATCH)
        other.events.clear()
        other.send(Hello(PROTOCOL, "other", 1))
        other.wait(lambda: other.welcome is not None)
        other.send(other.vocabulary)
        other.refused(ErrorCode.VOCABULARY_MISMATCH)
        request = other.generate([1])
        other.wait(lambda: request in other.failed)
        assert other.failed[request].code is ErrorCode.NO_HELLO


def test_nothing_is_done_for_a_stranger(daemon: Daemon, client: Client) -> None:
    with Client(daemon.address) as stranger:
        request = stranger.generate([1])
        stranger.wait(lambda: request in stranger.failed)
        assert stranger.failed[request].code is ErrorCode.NO_HELLO


def test_frames_that_are_no_messages_harm_nobody(daemon: Daemon, client: Client, tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (os.mkdir, (str(tmp_path / "canary"),))

    running = client.generate([3, 1], max_tokens=2000)
    client.wait(lambda: (running, 0) in client.tokens)
    bad = [
        b"",
        b"\x00",
        os.urandom(1000),
        pickle.dumps(Canary()),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"{}",
        b"\x81\xa4type\xa4nope",
        b"\x82\xa4type\xa6cancel\xa7request\xff",
    ]
    with Client(daemon.address) as attacker:
        for frame in bad * 3:
            attacker.socket.send(frame)
        attacker.refused(ErrorCode.BAD_FRAME)
        attacker.socket.send_multipart([b"a", b"b", b"c"])
        attacker.socket.send(b"x" * (MAX_FRAME_BYTES + 1))
        assert answer(client, running) == greedy([3, 1], 2000)
        assert not (tmp_path / "canary").exists()
        assert client.probe() < 5.0
    assert daemon.process.poll() is None


def idle(client: Client) -> bool:
    stats = client.find(Stats)
    return stats is not None and stats.core.gauges["wkvm_slots_used"] == 0.0 == stats.core.gauges["wkvm_requests_open"]


def test_rows_of_a_killed_frontend_are_freed(daemon: Daemon, client: Client) -> None:
    dead = daemon.client()
    for _ in range(8):
        dead.generate([1], max_tokens=1_000_000)
    dead.wait(lambda: len(dead.tokens) == 8)
    dead.close()
    client.events.clear()
    started = time.monotonic()
    client.wait(lambda: idle(client), 10.0)
    assert time.monotonic() - started < 5.0


def test_a_goodbye_ends_the_requests_of_its_frontend(daemon: Daemon, client: Client) -> None:
    with daemon.client() as leaving:
        leaving.generate([1], max_tokens=1_000_000)
        leaving.wait(lambda: len(leaving.tokens) == 1)
        leaving.send(Goodbye())
        client.events.clear()
        client.wait(lambda: idle(client))


def test_a_frontend_whose_lease_ended_is_told_to_say_hello(daemon: Daemon) -> None:
    with daemon.client() as sleeper:
        time.sleep(2.0)
        sleeper.send(Ping(5))
        sleeper.refused(ErrorCode.NO_HELLO)
        sleeper.welcome = None
        sleeper.hello()
        assert answer(sleeper, sleeper.generate([8], max_tokens=3)) == greedy([8], 3)


def test_metrics_of_frontends_are_summed_and_never_go_back(daemon: Daemon, client: Client) -> None:
    from wkvm_proto.messages import Metrics

    with daemon.client() as other:
        other.send(Ping(1, metrics=Metrics({"x_total": 5.0}, {"open": 2.0})))
        client.send(Ping(1, metrics=Metrics({"x_total": 7.0}, {"open": 1.0})))
        client.wait(lambda: (s := client.find(Stats)) is not None and s.frontends.counters.get("x_total") == 12.0)
        other.send(Goodbye())
    client.events.clear()
    client.wait(lambda: (s := client.find(Stats)) is not None and s.frontends.gauges.get("open") == 1.0)
    stats = client.find(Stats)
    assert stats is not None
    assert stats.frontends.counters["x_total"] == 12.0


def test_a_second_daemon_on_the_same_store_or_socket_ends_with_78_and_the_first_goes_on(
    daemon: Daemon, client: Client, tmp_path: Path
) -> None:
    running = client.generate([6], max_tokens=2000)
    for store, address in (
        (daemon.folder / "store", tmp_path / "b.sock"),
        (tmp_path / "other", daemon.socket),
    ):
        second = subprocess.run(
            [sys.executable, "-m", "wkvm_core", "--model", "counting", "--store", str(store), "--socket", str(address)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 78, second.stderr
        assert "another wkvm-core holds the" in second.stderr
        assert "choose another" in second.stderr
        assert "Traceback" not in second.stderr
    assert answer(client, running) == greedy([6], 2000)


@pytest.mark.parametrize(
    "flags",
    [
        ["--slots", "0"],
        ["--slots", "many"],
        ["--slots", str(2**24), "--model", "demo"],
        ["--model", "/nowhere/at/all"],
        ["--dtype", "int3"],
        ["--step-tokens", "4", "--max-rows", "8"],
        ["--socket", "/tmp/" + "x" * 120],
        ["--config", "/nowhere.toml"],
        ["--max-prompt-tokens", "99999999999"],
    ],
)
def test_a_bad_setting_ends_with_78_and_says_which(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wkvm_core", "--model", "counting", "--store", str(tmp_path), *flags]
    if "--socket" not in flags:
        command += ["--socket", str(tmp_path / "c.sock")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 78, result.stderr
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_come_from_a_file_then_the_environment_then_flags(tmp_path: Path) -> None:
    config = tmp_path / "wkvm.toml"
    config.write_text('model = "counting"\nslots = 3\nmax_rows = 5\nmodel_name = "from-file"\n')
    environment = {"WKVM_CONFIG": str(config), "WKVM_SLOTS": "4", "WKVM_MAX_ROWS": "6"}
    with Daemon("--slots", "7", environment=environment) as daemon, daemon.client():
        log = daemon.log.read_text()
    assert "slots    7 of" in log
    assert "6 rows" in log
    assert "from-file" in log


def test_sigterm_lets_requests_end_refuses_new_ones_and_exits_with_0() -> None:
    with Daemon("--slots", "4") as daemon, daemon.client() as client:
        running = client.generate([1], max_tokens=3000)
        client.wait(lambda: (running, 0) in client.tokens)
        daemon.process.send_signal(signal.SIGTERM)
        client.wait(lambda: (s := client.find(Stats)) is not None and s.draining)
        late = client.generate([2])
        client.wait(lambda: late in client.failed)
        assert client.failed[late].code is ErrorCode.DRAINING
        assert client.failed[late].retry_after_s > 0
        assert answer(client, running) == greedy([1], 3000)
        assert daemon.process.wait(10) == 0
        assert not daemon.socket.exists()


def test_a_second_sigterm_ends_at_once_with_every_request_answered() -> None:
    with Daemon("--slots", "4") as daemon, daemon.client() as client:
        running = client.generate([1], max_tokens=1_000_000)
        client.wait(lambda: (running, 0) in client.tokens)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        daemon.process.send_signal(signal.SIGTERM)
        client.wait(lambda: running in client.failed)
        assert client.failed[running].code is ErrorCode.DRAINING
        assert daemon.process.wait(10) == 0


def test_after_kill_9_the_same_core_starts_again_under_a_new_epoch() -> None:
    with Daemon("--slots", "4") as daemon:
        with daemon.client() as client:
            before = client.find(Welcome)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            after = client.find(Welcome)
            assert answer(client, client.generate([1], max_tokens=3)) == greedy([1], 3)
    assert before is not None and after is not None
    assert before.epoch != after.epoch


def test_systemd_hears_of_start_progress_and_stop(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        with Daemon(environment=environment) as daemon:
            heard: list[str] = []
            while not any("WATCHDOG=1" in text for text in heard):
                heard.append(systemd.recv(4096).decode())
            assert any(text.startswith("STATUS=") for text in heard)
            assert any(text.startswith("READY=1\nSTATUS=") for text in heard)
            daemon.process.send_signal(signal.SIGTERM)
            while not any("STOPPING=1" in text for text in heard):
                heard.append(systemd.recv(4096).decode())
            assert daemon.process.wait(10) == 0


def test_a_vocabulary_that_is_none_binds_nobody() -> None:
    with Daemon() as daemon:
        daemon.wait_until_bound()
        longer = vocabulary_message([*BYTES, b"more"])
        for hostile in (Vocabulary(b"abc", b""), Vocabulary(pack_u32([5, 2]), b"hello"), longer):
            with Client(daemon.address) as attacker:
                attacker.send(Hello(PROTOCOL, "bad", 1, vocabulary_digest(hostile)))
                attacker.wait(lambda attacker=attacker: attacker.welcome is not None)
                attacker.send(hostile)
                attacker.refused(ErrorCode.BAD_FRAME)
        with daemon.client() as client:
            assert answer(client, client.generate([1], max_tokens=3)) == greedy([1], 3)
