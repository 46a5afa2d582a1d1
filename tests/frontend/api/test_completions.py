"""POST /v1/completions"""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2 as httpx
import pytest

from tests.fakes.scripted_core import ScriptedCore
from tests.frontend.conftest import Api
from tests.frontend.events import events, finish_reasons, raw_request, read_all, texts
from wkvm_proto.columns import unpack_u32


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "hi", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json={"prompt": "hi", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def test_joined_deltas_are_the_whole_text_and_the_decoded_ids(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("  two  blanks 안녕하세요 🌶️ \n ")
    found = stream(http, return_token_ids=True, max_tokens=100)
    whole = ask(http, return_token_ids=True, max_tokens=100)["choices"][0]
    ids = [token for event in found for choice in event["choices"] for token in choice.get("token_ids", [])]
    decoded = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert texts(found, "text")[0] == whole["text"] == decoded == "  two  blanks 안녕하세요 🌶️ \n "
    assert whole["token_ids"] == ids
    assert whole["prompt_token_ids"] == list(b"hi")


def test_no_event_but_the_last_is_empty_and_none_holds_half_a_character(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("a안b🌶️c")
    deltas = [choice["text"] for event in stream(http) for choice in event["choices"]]
    assert deltas == ["a", "안", "b", "🌶", "\ufe0f", "c", ""]


def test_bytes_that_are_no_text_become_replacement_characters(http: httpx.Client, core: ScriptedCore) -> None:
    core.say(b"a\xffb\xec\x95")
    assert texts(stream(http), "text")[0] == ask(http)["choices"][0]["text"] == "a\ufffdb\ufffd"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("n", [1, 3])
def test_exactly_max_tokens_come_and_are_counted(http: httpx.Client, core: ScriptedCore, count: int, n: int) -> None:
    fields = {"max_tokens": count, "n": n, "ignore_eos": True, "return_token_ids": True}
    whole = ask(http, **fields)
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [count] * n
    assert whole["usage"]["completion_tokens"] == n * count
    assert whole["usage"]["total_tokens"] == 2 + n * count
    found = stream(http, **fields, stream_options={"include_usage": True})
    assert found[-1]["usage"]["completion_tokens"] == n * count
    assert finish_reasons(found) == dict.fromkeys(range(n), "length")
    assert {len(text) for text in texts(found, "text").values()} == {count}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_only_when_asked_for_in_one_event_without_choices(http: httpx.Client, n: int, path: str) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": n, "max_tokens": 3}
    for options in (None, {}, {"include_usage": False}):
        found = events(http.post(path, json=body | {"stream_options": options}).text)
        assert not any("usage" in event for event in found)
    found = events(http.post(path, json=body | {"stream_options": {"include_usage": True}}).text)
    assert [event["choices"] for event in found if event["usage"] is not None] == [[]]
    assert found[-1]["usage"]["completion_tokens"] == 3 * n


def test_continuous_usage_grows_with_every_event(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in stream(http, max_tokens=4, stream_options=options)]
    assert counts == [1, 2, 3, 4, 4, 4]


def test_a_stop_string_is_cut_out_whole_and_nothing_of_it_leaks(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("ABCDEFGHIJKL")
    found = stream(http, stop=["DEFGHIJ"], logprobs=1)
    assert texts(found, "text")[0] == "ABC"
    assert finish_reasons(found) == {0: "stop"}
    shown = [choice for event in found for choice in event["choices"]]
    assert [choice["text"] for choice in shown] == ["A", "B", "C", ""]
    assert [choice["logprobs"]["tokens"] for choice in shown[:3]] == [["A"], ["B"], ["C"]]
    whole = ask(http, stop=["DEFGHIJ"], logprobs=1)["choices"][0]
    assert whole["text"] == "ABC"
    assert whole["logprobs"]["tokens"] == ["A", "B", "C"]
    assert whole["stop_reason"] == "DEFGHIJ"


def test_text_held_for_a_stop_that_does_not_come_is_released(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("ABCDEFGHIJKL")
    assert texts(stream(http, stop="DEFGHIX"), "text")[0] == "ABCDEFGHIJKL"


def test_a_stop_string_is_shown_on_request(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("ABCDEFGHIJKL")
    fields = {"stop": ["DEFGHIJ"], "include_stop_str_in_output": True}
    assert texts(stream(http, **fields), "text")[0] == ask(http, **fields)["choices"][0]["text"] == "ABCDEFGHIJ"


@pytest.mark.parametrize("stop", [None, [], " ", "\n", ["\n", " "]])
def test_ordinary_stops_are_taken(http: httpx.Client, core: ScriptedCore, stop: Any) -> None:
    core.say("ab c\nd")
    expected = "ab c\nd" if not stop else "ab" if " " in stop else "ab c"
    assert ask(http, stop=stop)["choices"][0]["text"] == expected


def test_stop_token_ids_end_the_text(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("abcd")
    choice = ask(http, stop_token_ids=[ord("c")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ord("c"))


def test_prompts_may_be_text_ids_or_lists_of_them(http: httpx.Client, core: ScriptedCore) -> None:
    for prompt, expected in (
        ("hi", [b"hi"]),
        (["hi"], [b"hi"]),
        (["a", "b"], [b"a", b"b"]),
        ([104, 105], [b"hi"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ):
        core.requests.clear()
        answer = ask(http, prompt=prompt, max_tokens=2, n=2)
        assert [bytes(unpack_u32(request.prompt).tolist()) for request in core.requests] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_the_body_of_a_plain_langchain_client_works(http: httpx.Client) -> None:
    answer = ask(
        http, prompt=["x"], n=1, logit_bias={}, best_of=1, logprobs=None, stop=None, user="", suffix=None, echo=False,
        unknown_field={"deep": [1]},
    )  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompt",
    [[-1], [[-1]], [5279552648203111001], [1.5], [True], [[]], [], [[1], "a"], "", [""], [256], [["a"]], {}, 5],
)
def test_strange_prompts_are_refused(http: httpx.Client, core: ScriptedCore, prompt: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")
    assert not core.requests


def test_sampling_fields_reach_the_core_as_given(http: httpx.Client, core: ScriptedCore) -> None:
    ask(
        http, temperature=1e-7, top_p=0.5, top_k=7, min_p=0.1, typical_p=0.9, seed=42, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"5": -100, "6": 1.5}, min_tokens=2, logprobs=3,
        priority=5, cache_salt="salt", stop_token_ids=[9],
    )  # fmt: skip
    request = core.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1e-7, 0.5, 7, 0.1)
    assert (sampling.typical_p, sampling.seed, sampling.min_tokens, sampling.logprobs) == (0.9, 42, 2, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(zip(unpack_u32(sampling.bias_ids), (-100.0, 1.5), strict=True)) == {5: -100.0, 6: 1.5}
    assert list(unpack_u32(sampling.stop_ids)) == [0, 9]
    assert (request.priority, request.cache_salt, request.tenant) == (5, "salt", "dev")


def test_without_a_seed_equal_prompts_get_seeds_of_their_own(http: httpx.Client, core: ScriptedCore) -> None:
    ask(http, prompt=["a", "a"])
    ask(http, prompt=["a", "a"], seed=-1)
    assert len({request.sampling.seed for request in core.requests}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9), ("n", -1), ("n", 0), ("n", 2**63), ("n", 1.5), ("n", "1"), ("n", True), ("n", 9),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**9), ("max_tokens", "5"), ("min_tokens", 17),
        ("temperature", -1), ("temperature", 1e9), ("temperature", "1"), ("top_p", 1.1), ("top_p", -0.1),
        ("top_k", -2), ("min_p", 2), ("typical_p", -1), ("seed", -2), ("seed", 2**64), ("presence_penalty", 3),
        ("repetition_penalty", 0), ("logprobs", 21), ("logprobs", True), ("best_of", 3), ("priority", 101),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", 5),
        ("stop_token_ids", [256]), ("stop_token_ids", [-1]), ("logit_bias", {"256": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}), ("logit_bias", {"5": 1e308}), ("logit_bias", {"5": None}), ("logit_bias", [1]),
        ("echo", True), ("suffix", "x"), ("response_format", {"type": "json_object"}), ("prompt_logprobs", 1),
        ("structured_outputs", {"regex": "a"}), ("session", "s"),
        ("return_state", True), ("state_data", "AA"), ("cache", False), ("stream_options", {"include_usage": 1}),
        ("prompt", ["a"] * 257), ("cache_salt", "x" * 161),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused_by_name(
    http: httpx.Client, core: ScriptedCore, field: str, value: Any
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hi", field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert field in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert not core.requests


def test_an_id_beyond_the_vocabulary_is_named(http: httpx.Client) -> None:
    for body in ({"logit_bias": {"4096": 1}}, {"prompt": [4096]}, {"stop_token_ids": [4096]}):
        assert "4096" in http.post("/v1/completions", json={"prompt": "a"} | body).json()["error"]["message"]


def test_everything_banned_is_the_cores_business(http: httpx.Client) -> None:
    ask(http, logit_bias={str(token): -100 for token in range(256)}, max_tokens=2)


def test_logprobs_are_finite_numbers_and_aligned_with_the_text(http: httpx.Client, core: ScriptedCore) -> None:
    core.say("ab🌶")
    shown = ask(http, logprobs=5)["choices"][0]["logprobs"]
    assert shown["tokens"][:2] == ["a", "b"]
    assert shown["tokens"][2] == "bytes:\\xf0"
    assert shown["text_offset"] == [0, 1, 2, 2, 2, 2]
    assert shown["token_logprobs"] == pytest.approx([math.log(0.5)] * 6)
    assert min(shown["top_logprobs"][0].values()) == -9999.0
    assert len(shown["top_logprobs"]) == 6
    assert ask(http, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("piece", [1, 1_000_000])
def test_every_event_ends_with_a_blank_line_on_the_wire(api: Api, core: ScriptedCore, version: str, piece: int) -> None:
    body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 5}).encode()
    extra = "Accept-Encoding: gzip, deflate, br\r\nConnection: close\r\n"
    line = raw_request(api.address, body, version=version, extra=extra)
    data = read_all(line, piece)
    head, _, rest = data.partition(b"\r\n\r\n")
    line.close()
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"content-encoding" not in head
    if b"transfer-encoding: chunked" in head:
        chunks = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        rest = b"".join(chunks)
    assert len(events(rest.decode())) == 6
