"""Start, loss of the core, shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.scripted_core import BYTE_CARD, ScriptedCore
from tests.frontend.conftest import StartApi
from tests.frontend.events import events, eventually, raw_request, read_all

STREAM = json.dumps({"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True, "stream": True}).encode()
SHORT = {"prompt": "hi", "max_tokens": 3}


def test_from_the_start_the_process_is_live_and_the_first_ready_answer_is_true(
    start_api: StartApi, tmp_path: Path
) -> None:
    core = ScriptedCore(tmp_path)
    api = start_api(core.uri)
    assert api.http.get("/live").status_code == 200
    for path in ("/ready", "/health", "/v1/models", "/v1/models/counting"):
        answer = api.http.get(path)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
    began = time.monotonic()
    refused = api.http.post("/v1/completions", json=SHORT)
    assert time.monotonic() - began > 0.9
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    core.open()
    api.wait_ready()
    assert api.http.post("/v1/completions", json=SHORT).status_code == 200
    assert api.http.get("/v1/models").json()["data"][0]["id"] == "counting"
    core.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_core_ends_what_is_open_and_the_next_one_is_used(
    start_api: StartApi, own_core: ScriptedCore, stream: bool
) -> None:
    api = start_api(own_core.uri).wait_ready()
    own_core.step_s = 0.01
    body = json.dumps(json.loads(STREAM) | {"stream": stream}).encode()
    line = raw_request(api.address, body, version="1.0")
    assert eventually(lambda: own_core.live == 1)
    time.sleep(0.1)
    own_core.close()
    began = time.monotonic()
    answer = read_all(line).decode()
    line.close()
    assert time.monotonic() - began < 3
    if stream:
        assert events(answer.partition("\r\n\r\n")[2])[-1]["error"]["code"] == "engine_restarted"
    else:
        assert " 503 " in answer.partition("\r\n")[0]
    refused = api.http.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503
    own_core.epoch += 1
    own_core.open()
    api.wait_ready()
    assert api.http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_core_that_falls_silent_is_taken_for_dead(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri, flags=("--core-silence-s", "0.7")).wait_ready()
    own_core.step_s = 0.01
    line = raw_request(api.address, STREAM, version="1.0")
    assert eventually(lambda: own_core.live == 1)
    own_core.silent = True
    assert events(read_all(line).decode().partition("\r\n\r\n")[2])[-1]["error"]["code"] == "engine_restarted"
    line.close()
    own_core.silent = False
    api.wait_ready()


def test_a_hung_step_loop_is_not_ready_though_it_is_healthy(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri, flags=("--ready-timeout-s", "0.2")).wait_ready()
    own_core.loop_hangs = True
    assert api.http.get("/ready").status_code == 503
    assert api.http.get("/health").status_code == 200
    own_core.loop_hangs = False
    assert api.http.get("/ready").status_code == 200


def test_a_request_waits_a_moment_for_a_core_that_is_coming(start_api: StartApi, tmp_path: Path) -> None:
    core = ScriptedCore(tmp_path)
    api = start_api(core.uri, flags=("--core-wait-s", "10"))
    line = raw_request(api.address, json.dumps(SHORT).encode(), version="1.0")
    time.sleep(0.2)
    core.open()
    assert b" 200 " in read_all(line)
    line.close()
    core.close()


def test_a_restarted_core_gets_the_vocabulary_anew(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri).wait_ready()
    own_core.restart()
    assert eventually(lambda: own_core.table is not None, 10)
    api.wait_ready()
    assert own_core.table is not None
    assert own_core.table[65] == b"A"


def test_requests_go_to_the_core_that_serves_the_model(start_api: StartApi, tmp_path: Path) -> None:
    cores = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        card = type(BYTE_CARD)(
            **{field: getattr(BYTE_CARD, field) for field in BYTE_CARD.__struct_fields__} | {"name": name}
        )
        cores.append(ScriptedCore(tmp_path / name, card).open())
    api = start_api(*(core.uri for core in cores)).wait_ready()
    assert eventually(lambda: len(api.http.get("/v1/models").json()["data"]) == 2)
    for core in cores:
        answer = api.http.post("/v1/completions", json=SHORT | {"model": core.card.name})
        assert answer.json()["model"] == core.card.name
        assert len(core.requests) == 1
    assert api.http.post("/v1/completions", json=SHORT).json()["error"]["param"] == "model"
    unknown = api.http.post("/v1/completions", json=SHORT | {"model": "three"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert api.http.get("/v1/models/one").json()["id"] == "one"
    assert api.http.get("/v1/models/three").status_code == 404
    for core in cores:
        core.close()


def test_of_two_cores_with_one_model_the_less_loaded_is_taken(start_api: StartApi, tmp_path: Path) -> None:
    cores = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        cores.append(ScriptedCore(tmp_path / name).open())
        cores[-1].step_s = 0.02
    api = start_api(*(core.uri for core in cores)).wait_ready()
    assert eventually(lambda: api.http.get("/ready").json().get("cores") == 2)
    lines = []
    for count in range(1, 5):
        lines.append(raw_request(api.address, STREAM))
        assert eventually(lambda: sum(core.live for core in cores) == count)  # noqa: B023
    assert [core.live for core in cores] == [2, 2]
    for line in lines:
        line.close()
    for core in cores:
        core.close()


def test_sigterm_lets_streams_finish_and_ends_with_status_0(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri).wait_ready()
    own_core.step_s = 0.02
    body = json.dumps({"prompt": "hi", "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    line = raw_request(api.address, body, version="1.0")
    assert eventually(lambda: own_core.live == 1)
    api.process.send_signal(signal.SIGTERM)
    assert len(events(read_all(line).decode().partition("\r\n\r\n")[2])) == 41
    line.close()
    assert api.process.wait(10) == 0
    assert eventually(lambda: own_core.goodbyes == 1)
    with pytest.raises(ConnectionError):
        socket.create_connection(api.address, timeout=1)


def test_streams_that_outlast_the_shutdown_are_told(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri, flags=("--drain-s", "0.3")).wait_ready()
    own_core.step_s = 0.02
    line = raw_request(api.address, STREAM, version="1.0")
    assert eventually(lambda: own_core.live == 1)
    api.process.send_signal(signal.SIGTERM)
    assert events(read_all(line).decode().partition("\r\n\r\n")[2])[-1]["error"]["code"] == "draining"
    line.close()
    assert api.process.wait(10) == 0
    assert eventually(lambda: own_core.live == 0)


def test_several_processes_share_a_port(start_api: StartApi, own_core: ScriptedCore) -> None:
    first = start_api(own_core.uri, flags=("--reuse-port",)).wait_ready()
    # The later flag counts.
    second = start_api(own_core.uri, flags=("--reuse-port", "--port", str(first.address[1])))
    assert first.address == second.address
    third = subprocess.run(
        [sys.executable, "-m", "wkvm_frontend", "--core", own_core.uri, "--port", str(first.address[1])],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert third.returncode == 78
    assert "Address already in use" in third.stderr


def test_an_inherited_socket_is_served(own_core: ScriptedCore) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "wkvm_frontend", "--core", own_core.uri, "--fd", str(listener.fileno())],
        pass_fds=(listener.fileno(),), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    listener.close()
    line = socket.create_connection(("127.0.0.1", port), timeout=10)
    line.sendall(b"GET /live HTTP/1.0\r\n\r\n")
    assert b" 200 " in read_all(line)
    line.close()
    process.terminate()
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--core"),
        (["--core", "tcp://10.0.0.1:5"], "--core"),
        (["--core", "ipc:///x", "--host", "0.0.0.0"], "--host"),
        (["--core", "ipc:///x", "--host", "example.com"], "--host"),
        (["--core", "ipc:///x", "--port", "70000"], "--port"),
        (["--core", "ipc:///x", "--fd", "77"], "descriptor 77"),
        (["--core", "ipc:///x", "--log-level", "loud"], "--log-level"),
    ],
)
def test_bad_settings_end_the_start_with_status_78(flags: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wkvm_frontend", *flags], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 78
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_world_model_without_its_vocabulary_file_says_what_to_put_where(start_api: StartApi, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    fields = {field: getattr(BYTE_CARD, field) for field in BYTE_CARD.__struct_fields__}
    card = type(BYTE_CARD)(**fields | {"directory": str(model), "family": "rwkv7", "vocab_size": 65_536})
    core = ScriptedCore(tmp_path, card).open()
    api = start_api(core.uri)

    def log() -> str:
        return Path(f"/proc/{os.getpid()}/fd/{api.log.fileno()}").read_text()

    assert eventually(lambda: "rwkv_vocab_v20230424.txt" in log())
    assert str(model) in log()
    assert api.http.get("/ready").status_code == 503
    core.close()


def test_nothing_is_left_at_idle_after_a_burst_that_is_given_up(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri).wait_ready()
    own_core.step_s = 0.005

    def burst() -> None:
        for _ in range(10):
            line = raw_request(api.address, STREAM)
            line.recv(1000)
            line.close()

    threads = [threading.Thread(target=burst) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: len(own_core.cancelled) == 40 and own_core.live == 0)
    assert eventually(lambda: "wkvm_http_streams_open 0.0" in api.http.get("/metrics").text)
    assert eventually(lambda: "wkvm_http_cancelled_total 40.0" in api.http.get("/metrics").text)
