"""What reaches the server as bytes: encodings, sizes, hosts, clients that leave, dawdle or do not read."""

from __future__ import annotations

import json
import socket
import time

import httpx2 as httpx
import pytest

from tests.fakes.scripted_core import ScriptedCore
from tests.frontend.conftest import Api, StartApi
from tests.frontend.events import events, eventually, raw_request, read_all
from wkvm_proto.messages import Failed
from wkvm_proto.names import ErrorCode

CHAT = b'{"messages":[{"role":"user","content":"%s"}],"max_tokens":2}'
LONG = json.dumps({"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True}).encode()
LONG_STREAM = json.dumps({"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True, "stream": True}).encode()


def post(http: httpx.Client, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CHAT % "你好".encode("gbk"), "UTF-8"),
        ((CHAT % b"x").decode().encode("utf-16"), "UTF-8"),
        (b"\xef\xbb\xbf" + CHAT % b"x", "byte order mark"),
        (b"", "empty"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (CHAT[:-1] % b"x" + b',"temperature":NaN}', "JSON"),
        (CHAT[:-1] % b"x" + b',"temperature":Infinity}', "JSON"),
        (CHAT[:-1] % b"x" + b',"temperature":1e999}', ""),
        (CHAT[:-1] % b"x" + b',"temperature":"NaN"}', "temperature"),
        (CHAT % b"\\ud800", ""),
    ],
)
def test_a_body_that_is_no_json_of_ours_is_refused_and_the_server_lives(
    http: httpx.Client, body: bytes, said: str
) -> None:
    answer = post(http, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert post(http, CHAT % b"x").status_code == 200


def test_a_nul_and_other_control_characters_are_text(http: httpx.Client) -> None:
    assert post(http, CHAT % b"a\\u0000b\\u001b").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_taken(http: httpx.Client, kind: str) -> None:
    assert post(http, CHAT % b"x", **{"content-type": kind}).status_code == 415


def test_a_charset_does_no_harm(http: httpx.Client) -> None:
    assert post(http, CHAT % b"x", **{"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    assert post(http, CHAT % b"x", **{"content-encoding": "gzip"}).status_code == 415


def test_a_body_above_the_limit_is_refused_before_it_has_come(api: Api) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    line.sendall(b"Content-Length: 99999999999\r\n\r\n")
    assert b" 413 " in read_all(line)
    line.close()


def test_a_body_without_length_is_cut_off_at_the_limit(api: Api) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    line.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    assert sent_before_refusal(line, chunk, 64) < 64
    line.close()


def sent_before_refusal(line: socket.socket, piece: bytes, most: int) -> int:
    """How many pieces could be sent until the other side closed."""
    for count in range(most):
        try:
            line.sendall(piece)
        except ConnectionError:
            return count
    return most


@pytest.mark.parametrize("host", ["evil.test", "localhost.evil.test", "evil.test:80", "[::2]:80", "10.0.0.1"])
def test_a_foreign_host_is_refused(api: Api, host: str) -> None:
    line = raw_request(api.address, LONG, host=host, extra="Connection: close\r\n")
    assert b" 421 " in read_all(line)
    line.close()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"])
def test_loopback_names_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/live", headers={"host": host}).status_code == 200


def test_no_foreign_page_is_let_in(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"origin": "https://evil.test"})
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert http.request("OPTIONS", "/v1/chat/completions", headers={"origin": "https://evil.test"}).status_code == 405


def test_a_huge_head_is_refused(api: Api) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: ")
    assert sent_before_refusal(line, b"a" * 65_536, 256) < 256
    line.close()


@pytest.mark.parametrize("head", [b"X-A: " + b"a" * 70_000 + b"\r\n", b"X-A: a\r\n" * 200])
def test_a_head_beyond_the_limits_is_answered_431(api: Api, head: bytes) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n")
    assert b" 431 " in read_all(line)
    line.close()


def test_what_is_no_http_is_answered_400(api: Api) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    answer = read_all(line)
    assert b" 400 " in answer
    assert b'{"error":' in answer
    line.close()


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_ends_the_connection(api: Api, sent: bytes) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(sent)
    assert b" 408 " in read_all(line)
    line.close()


def test_a_body_that_does_not_come_is_answered_408(api: Api) -> None:
    line = socket.create_connection(api.address, timeout=10)
    line.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    line.sendall(b'Content-Length: 10\r\n\r\n{"')
    assert b" 408 " in read_all(line)
    line.close()


def test_a_sane_request_id_is_kept_and_another_replaced(http: httpx.Client) -> None:
    assert http.get("/live", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    assert http.get("/nope", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    assert "<" not in http.get("/live", headers={"x-request-id": "<script>"}).headers["x-request-id"]
    assert len({http.get("/live").headers["x-request-id"] for _ in range(3)}) == 3


def test_unknown_paths_and_methods_are_answered_in_the_error_shape(http: httpx.Client) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("DELETE", "/live", 405)):
        answer = http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("first_token_s", [0.0, 30.0])
@pytest.mark.parametrize("body", [LONG, LONG_STREAM])
def test_a_client_that_leaves_is_noticed_at_once(
    api: Api, core: ScriptedCore, first_token_s: float, body: bytes
) -> None:
    core.step_s, core.first_token_s = 0.01, first_token_s
    line = raw_request(api.address, body)
    assert eventually(lambda: core.live == 1)
    time.sleep(0.05)
    left = time.monotonic()
    line.close()
    assert eventually(lambda: core.cancelled)
    assert core.live == 0
    assert core.cancelled[0][0] - left < 1.0
    if first_token_s:
        assert core.cancelled[0][1].delivered_tokens == 0


def test_delivered_tokens_are_counted_when_a_client_leaves(api: Api, core: ScriptedCore) -> None:
    core.step_s = 0.02
    line = raw_request(api.address, LONG_STREAM)
    data = b""
    while data.count(b'"text":') < 3:
        data += line.recv(65536)
    line.close()
    assert eventually(lambda: core.cancelled)
    assert 3 <= core.cancelled[0][1].delivered_tokens <= 10


def test_a_silent_stream_has_its_head_at_once_and_comments_meanwhile(api: Api, core: ScriptedCore) -> None:
    core.first_token_s = 1.0
    began = time.monotonic()
    with api.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as answer:
        headers_after = time.monotonic() - began
        text = answer.read().decode()
    assert headers_after < 0.9
    assert text.count(": keep-alive\n\n") >= 2
    assert len(events(text)) == 17


def test_a_reader_that_does_not_keep_up_is_ended_and_told(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri, flags=("--max-stream-bytes", "65536")).wait_ready()
    body = {"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(api.address)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    line.sendall(head.encode() + data)
    assert eventually(lambda: own_core.cancelled, 20), "the core goes on for a reader that does not read"
    assert own_core.tokens_sent < 60_000
    answer = read_all(line).decode()
    line.close()
    last = events(answer.partition("\r\n\r\n")[2])[-1]
    assert last["error"]["code"] == "slow_consumer"
    assert eventually(lambda: "wkvm_http_slow_consumers_total 1.0" in api_metrics(api))


def test_a_reader_that_reads_nothing_is_disconnected(start_api: StartApi, own_core: ScriptedCore) -> None:
    api = start_api(own_core.uri, flags=("--max-stream-bytes", "65536", "--slow-client-s", "0.5")).wait_ready()
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(api.address)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(LONG_STREAM)}\r\n\r\n"
    )
    line.sendall(head.encode() + LONG_STREAM)
    assert eventually(lambda: own_core.cancelled, 20)
    assert eventually(lambda: "wkvm_http_streams_open 0.0" in api_metrics(api), 10)
    line.close()


def api_metrics(api: Api) -> str:
    return api.http.get("/metrics").text


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (ErrorCode.QUEUE_FULL, 503, True),
        (ErrorCode.DRAINING, 503, True),
        (ErrorCode.TOO_MANY_SAMPLES, 400, False),
        (ErrorCode.PROMPT_TOO_LONG, 400, False),
        (ErrorCode.DEADLINE, 504, True),
        (ErrorCode.NUMERICAL_ERROR, 500, True),
        (ErrorCode.STATE_NOT_FOUND, 404, False),
        (ErrorCode.FINGERPRINT_MISMATCH, 409, False),
        (ErrorCode.INTERNAL, 500, False),
        (ErrorCode.VOCABULARY_MISMATCH, 500, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_comes_as_a_status_before_any_stream(
    http: httpx.Client, core: ScriptedCore, code: ErrorCode, status: int, retry: bool, stream: bool
) -> None:
    core.refuse = Failed(0, code, "at 0x7f00deadbeef in /home/x", "prompt", 12.3)
    answer = http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert ("x-should-retry" not in answer.headers) == retry
    assert answer.headers.get("retry-after") == ("13" if status == 503 else None)
    if status == 500 and not retry:
        assert error["code"] == "internal"
        assert "0x7f" not in answer.text
    else:
        assert error["code"] == code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_failure_in_mid_stream_is_an_event_and_the_end(http: httpx.Client, core: ScriptedCore, path: str) -> None:
    core.step_s = 0.02
    core.fail_after = (5, Failed(0, ErrorCode.NUMERICAL_ERROR, "The model's numbers broke."))
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    found = events(answer.text)
    assert found[-1]["error"] == {
        "message": "The model's numbers broke.", "type": "server_error", "param": None, "code": "numerical_error",
    }  # fmt: skip
    assert len(found) > 4
    whole = http.post(path, json=body | {"stream": False})
    assert whole.status_code == 500


def test_a_token_that_the_model_does_not_have_ends_one_stream_alone(http: httpx.Client, core: ScriptedCore) -> None:
    core.step_s = 0.02
    core.script = lambda prompt, sample: [97, 98, 99, 70_000, 97]
    assert core.table is not None
    core.table.extend([b""] * 70_000)  # of the core's own table: it does not mind
    body = {"prompt": "hi", "stream": True}
    assert events(http.post("/v1/completions", json=body).text)[-1]["error"]["code"] == "internal"
    assert http.post("/v1/completions", json=body | {"stream": False}).status_code == 500
    core.say("fine")
    assert events(http.post("/v1/completions", json=body).text)[-1]["choices"][0]["finish_reason"] == "stop"
    del core.table[256:]


def test_a_core_that_answers_nothing_does_not_hold_the_request_for_ever(
    start_api: StartApi, own_core: ScriptedCore
) -> None:
    api = start_api(own_core.uri, flags=("--accept-timeout-s", "0.3", "--core-silence-s", "60")).wait_ready()
    own_core.silent = True
    answer = api.http.post("/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_many_streams_at_once_are_each_whole(api: Api, core: ScriptedCore) -> None:
    lines = []
    for number in range(64):
        body = json.dumps({"prompt": "p" * number + "x", "max_tokens": 50, "stream": True, "ignore_eos": True})
        lines.append(raw_request(api.address, body.encode(), version="1.0"))
    for line in lines:
        found = events(read_all(line).decode().partition("\r\n\r\n")[2])
        line.close()
        assert len(found) == 51
    assert eventually(lambda: "wkvm_http_streams_open 0.0" in api_metrics(api))
