"""A `wkvm-api` before a real `wkvm-core`."""

from __future__ import annotations

import pytest

from tests.frontend.conftest import Api
from tests.frontend.events import events, eventually, raw_request, texts


def test_a_told_name_is_recalled_streamed_and_whole(whole: Api) -> None:
    body = {"messages": [{"role": "user", "content": "My name is Anna. What is my name?"}], "temperature": 0}
    answer = whole.http.post("/v1/chat/completions", json=body | {"max_tokens": 40}).json()["choices"][0]
    assert "Anna" in answer["message"]["content"]
    assert answer["finish_reason"] == "stop"
    streamed = events(whole.http.post("/v1/chat/completions", json=body | {"max_tokens": 40, "stream": True}).text)
    assert texts(streamed)[0] == answer["message"]["content"]


def test_a_stop_string_inside_tokens_keeps_the_text_before_it(whole: Api) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 30}
    full = whole.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = full[5:8]
    cut = whole.http.post("/v1/completions", json=body | {"stop": [stop]}).json()["choices"][0]
    assert cut["text"] == full[: full.index(stop)]
    found = events(whole.http.post("/v1/completions", json=body | {"stop": [stop], "stream": True}).text)
    assert texts(found, "text")[0] == cut["text"]


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_lengths_and_usage_are_exact(whole: Api, count: int) -> None:
    body = {"prompt": "x", "max_tokens": count, "ignore_eos": True, "n": 3, "return_token_ids": True, "logprobs": 2}
    answer = whole.http.post("/v1/completions", json=body).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [count] * 3
    assert answer["usage"]["completion_tokens"] == 3 * count


def test_a_client_that_leaves_frees_its_row(whole: Api) -> None:
    line = raw_request(whole.address, b'{"prompt": "x", "max_tokens": 100000, "ignore_eos": true, "stream": true}')
    line.recv(1000)
    line.close()
    assert eventually(lambda: 'wkvm_samples_finished_total{reason="cancelled"} 1.0' in whole.http.get("/metrics").text)
