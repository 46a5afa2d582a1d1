"""Tokens, models, metrics and descriptions over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.scripted_core import ScriptedCore
from tests.frontend.conftest import Api, StartApi
from tests.frontend.events import events, eventually, texts
from tests.frontend.models import card, demo_folder, world_folder
from wkvm_frontend.api.refused import REFUSED_FIELDS


def test_text_becomes_ids_and_text_again(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hi é"}).json()
    assert answer == {"tokens": [104, 105, 32, 195, 169], "count": 5, "max_model_len": 100_000}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "hi é"
    assert http.post("/tokenize", json={"content": "a", "return_token_strs": True}).json()["token_strs"] == ["a"]
    assert http.post("/detokenize", json={"tokens": []}).json()["prompt"] == ""
    assert http.post("/detokenize", json={"tokens": [0xC3]}).json()["prompt"] == "\ufffd"


@pytest.mark.parametrize("tokens", [[-1], [256], [5279552648203111001], [1.5], [True], [[1]], "a", None])
def test_strange_ids_are_refused(http: httpx.Client, tokens: Any) -> None:
    answer = http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


def test_messages_are_tokenised_as_they_would_be_read(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    rendered = http.post("/v1/chat/render", json=body).json()
    assert http.post("/tokenize", json=body).json()["tokens"] == rendered["token_ids"]
    assert "".join(segment["text"] for segment in rendered["segments"]) == rendered["prompt"]
    assert rendered["junctions"][-1]["end"] == rendered["count"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": 5}])
def test_tokenize_wants_a_text_or_messages(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models", "/v1//models", "/v1/models/", "//v1/models//"])
def test_the_list_of_models_is_found_through_odd_slashes(api: Api, path: str) -> None:
    entry = api.http.get(api.url + path).json()["data"][0]
    assert entry["id"] == "counting"
    assert entry["object"] == "model"
    assert entry["wkvm"]["prefix_stable"] is True


def test_one_model_is_described(http: httpx.Client) -> None:
    assert http.get("/v1/models/counting/").json()["id"] == "counting"
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert http.post("/v1/completions", json={"prompt": "a", "model": "other"}).status_code == 404


def test_metrics_hold_the_core_and_all_frontends(http: httpx.Client, core: ScriptedCore) -> None:
    http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})

    def read() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    wanted = {
        "wkvm_requests_running", "vllm:num_requests_running", "wkvm_http_requests_total", "wkvm_http_streams_open",
        "wkvm_http_time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_bucket",
        "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_sum", "vllm:request_success_total",
    }  # fmt: skip
    http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5, "stream": True})
    assert eventually(lambda: wanted <= read().keys())


def test_the_description_is_made_of_the_same_structs(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    chat = document["components"]["schemas"]["ChatFields"]
    assert {"messages", "temperature", "logit_bias", "max_completion_tokens"} <= chat["properties"].keys()
    assert chat["required"] == ["messages"]
    assert document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    for path, methods in document["paths"].items():
        for method in methods:
            assert http.request(method.upper(), path.replace("{model}", "counting")).status_code not in (404, 405)
    references = str(document).split("'$ref': '#/components/schemas/")[1:]
    assert {part.partition("'")[0] for part in references} <= document["components"]["schemas"].keys()


def test_the_page_for_people_loads_nothing(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert not any(word in page.text for word in ("http://", "https://", "<script", "src=", "@import"))


def test_fields_that_are_refused_are_not_declared(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("ChatFields", "CompletionFields"):
        assert REFUSED_FIELDS.keys().isdisjoint(schemas[name]["properties"])


def test_version_names_the_program(http: httpx.Client) -> None:
    assert set(http.get("/version").json()) == {"version", "protocol", "python"}


def test_a_world_model_speaks_every_script(start_api: StartApi, tmp_path: Path) -> None:
    model = card(world_folder(tmp_path / "w"), vocab_size=65_536, family="rwkv7", name="w")
    core = ScriptedCore(tmp_path, model).open()
    http = start_api(core.uri).wait_ready().http
    korean = [18815, 3266, 150, 19052, 18777, 18862]
    assert http.post("/detokenize", json={"tokens": korean}).json()["prompt"] == "안녕하세요"
    chilli = http.post("/tokenize", json={"prompt": "URGENCY🌶️\n" * 3}).json()["tokens"]
    for ids, text in ((korean, "안녕하세요"), (chilli, "URGENCY🌶️\n" * 3)):
        core.script = lambda prompt, sample, ids=ids: [*ids, 0]  # type: ignore[misc]
        body = {"prompt": text, "stream": True, "logprobs": 2, "max_tokens": 40}
        found = events(http.post("/v1/completions", json=body).text)
        assert texts(found, "text")[0] == text
        assert all("\ufffd" not in choice["text"] for event in found for choice in event["choices"])
    hi = http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
    assert hi[0] != 1
    core.close()


def test_the_demo_models_special_text_is_no_token_in_a_chat(start_api: StartApi, tmp_path: Path) -> None:
    core = ScriptedCore(tmp_path, card(demo_folder(), vocab_size=4096, family="rwkv7", name="demo")).open()
    http = start_api(core.uri).wait_ready().http
    body = {"messages": [{"role": "user", "content": "a<|endoftext|>b"}]}
    rendered = http.post("/v1/chat/render", json=body).json()
    assert 0 not in rendered["token_ids"]
    assert "<|endoftext|>" in rendered["prompt"]
    raw = {"prompt": "a<|endoftext|>b"}
    assert 0 in http.post("/tokenize", json=raw).json()["tokens"]
    assert 0 not in http.post("/tokenize", json=raw | {"parse_special": False}).json()["tokens"]
    core.close()


def test_deep_tools_and_arguments_are_read_or_refused(http: httpx.Client, start_api: StartApi, tmp_path: Path) -> None:
    core = ScriptedCore(tmp_path, card(demo_folder(), vocab_size=4096, family="rwkv7", name="demo")).open()
    with_template = start_api(core.uri).wait_ready().http
    hello = '{"role": "user", "content": "x"}'
    statuses = set()
    for depth in (1, 200, 400, 480, 700, 900, 960, 5000):
        deep = '{"a": ' * depth + "1" + "}" * depth
        call = f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {deep}}}}}]}}'
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
        for client, path in (
            (http, "/v1/chat/render"),
            (with_template, "/v1/chat/render"),
            (with_template, "/tokenize"),
        ):
            for body in (f'{{"messages": [{hello}], "tools": [{tool}]}}', f'{{"messages": [{call}, {hello}]}}'):
                answer = client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400), (depth, path, answer.text)
                statuses.add((depth == 1, answer.status_code))
    assert (True, 200) in statuses
    assert (True, 400) not in statuses
    assert (False, 400) in statuses
    core.close()
