"""Named states over HTTP, before a real core."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.frontend.conftest import Api
from tests.frontend.events import events, eventually, texts

NUMBERS = itertools.count()


@pytest.fixture
def name(whole: Api) -> Iterator[str]:
    """A name of the test's own, forgotten afterwards."""
    own = f"t{next(NUMBERS)}"
    yield own
    for entry in whole.http.get("/v1/states", params={"prefix": own}).json()["data"]:
        assert whole.http.delete(f"/v1/states/{entry['id']}").status_code == 200


def complete(whole: Api, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields
    answer = whole.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(whole: Api, method: str, path: str, **more: Any) -> tuple[int, str | None]:
    answer = whole.http.request(method, path, **more)
    error = answer.json()["error"]
    assert answer.headers["x-should-retry"] == "false"
    return answer.status_code, error["param"]


def test_a_chat_goes_on_from_a_state_with_the_new_message_alone(whole: Api, name: str) -> None:
    """A session in five lines of the official client."""
    client = OpenAI(base_url=f"{whole.url}/v1", api_key="none")

    def say(text: str, **extra: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model="wkvm-demo", messages=messages, max_tokens=40, temperature=0, extra_body=extra
        )

    told = say("My name is Anna.", save_as=name)
    assert told.wkvm["state"] == f"{name}@1"  # type: ignore[attr-defined]
    asked = say("What is my name?", state=name, save_as=name)
    assert "Anna" in (asked.choices[0].message.content or "")
    facts = asked.wkvm  # type: ignore[attr-defined]
    assert (facts["reuse"], facts["state"], facts["grade"]) == ("state", f"{name}@2", "bounded")
    assert asked.usage is not None and asked.usage.prompt_tokens_details is not None
    assert asked.usage.prompt_tokens_details.cached_tokens == facts["reused_tokens"] > 0
    stranger = say("What is my name?")
    assert "Anna" not in (stranger.choices[0].message.content or "")


def test_after_a_state_a_chat_reads_the_end_of_that_turn_and_the_new_messages(whole: Api) -> None:
    messages = [{"role": "user", "content": "What is my name?"}]
    alone, after = (
        whole.http.post("/v1/chat/render", json={"messages": messages} | extra).json()
        for extra in ({}, {"state": "anna"})
    )
    assert after["prompt"].endswith(alone["prompt"])
    between = after["prompt"].removesuffix(alone["prompt"])
    whole_turn = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}, *messages]
    both = whole.http.post("/v1/chat/render", json={"messages": whole_turn}).json()["prompt"]
    assert both.endswith("Ho." + between + alone["prompt"])
    assert between.strip() == "" and between  # this model's turns end with a blank line


def test_a_state_reads_on_where_it_ended(whole: Api, name: str) -> None:
    first = complete(whole, prompt="Once upon a time there was", max_tokens=4, save_as=name, return_token_ids=True)
    again = complete(whole, prompt=" a", state=f"{name}@1", save_as=name)
    own = first["choices"][0]
    consumed = len(own["prompt_token_ids"]) + len(own["token_ids"])
    record = whole.http.get(f"/v1/states/{name}@1").json()
    assert (record["tokens"], record["verb"], record["parents"], record["tier"]) == (consumed, "save", [], "host")
    assert again["wkvm"]["reused_tokens"] == consumed
    assert whole.http.get(f"/v1/states/{name}").json()["parents"] == [f"{name}@1"]


def test_streams_tell_the_state_in_an_event_before_the_end(whole: Api, name: str) -> None:
    body = {"prompt": "One two", "max_tokens": 4, "temperature": 0, "stream": True, "save_as": name}
    found = events(whole.http.post("/v1/completions", json=body).text)
    told = [event["wkvm"] for event in found if "wkvm" in event]
    assert told == [{"reuse": "cold", "reused_tokens": 0, "grade": "bounded", "state": f"{name}@1"}]
    assert texts(found, "text")[0]


def test_a_request_without_states_is_answered_as_ever(whole: Api) -> None:
    assert "wkvm" not in complete(whole)


def test_a_state_is_made_of_what_it_reads_and_reads_on(whole: Api, name: str) -> None:
    made = whole.http.post("/v1/states", json={"name": name, "prompt": "Once upon a time"})
    assert made.status_code == 201
    ids = whole.http.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    entry = made.json()
    assert (entry["id"], entry["tokens"], entry["parents"]) == (f"{name}@1", len(ids), [])
    longer = whole.http.post(f"/v1/states/{name}/append", json={"prompt": [5, 6, 7]}).json()
    assert (longer["id"], longer["tokens"], longer["parents"]) == (f"{name}@2", len(ids) + 3, [f"{name}@1"])
    aside = whole.http.post("/v1/states", json={"name": f"{name}-b", "from": f"{name}@1", "prompt": [9]}).json()
    assert (aside["id"], aside["tokens"]) == (f"{name}-b@1", len(ids) + 1)
    fork = whole.http.post("/v1/states", json={"name": f"{name}-c", "from": name}).json()
    assert (fork["verb"], fork["parents"], fork["tokens"]) == ("fork", [f"{name}@2"], len(ids) + 3)
    unnamed = whole.http.post("/v1/states", json={"prompt": [1]}).json()
    assert whole.http.delete(f"/v1/states/{unnamed['id']}").json()["states"] == [unnamed["id"]]


def test_what_was_read_at_once_and_in_parts_goes_on_alike(whole: Api, name: str) -> None:
    prompt = whole.http.post("/tokenize", json={"prompt": "Once upon a time there was a little"}).json()["tokens"]
    whole.http.post("/v1/states", json={"name": name, "prompt": prompt[:3]})
    whole.http.post(f"/v1/states/{name}/append", json={"prompt": prompt[3:-1]})
    went_on = complete(whole, prompt=prompt[-1:], state=name, max_tokens=8)["choices"][0]["text"]
    assert went_on == complete(whole, prompt=prompt, max_tokens=8)["choices"][0]["text"]


def test_a_mutation_makes_a_new_state_and_its_parent_keeps_every_bit(whole: Api, name: str) -> None:
    complete(whole, prompt="My name is Anna.", save_as=name)
    complete(whole, prompt="I live in Paris.", save_as=f"{name}-b")
    before = complete(whole, prompt=" So", state=f"{name}@1", max_tokens=6)["choices"][0]["text"]
    params = {"other": f"{name}-b", "weight": 0.25}
    made = whole.http.post(f"/v1/states/{name}/mutate", json={"rule": "merge", "params": params})
    assert made.status_code == 201
    entry = made.json()
    assert (entry["id"], entry["verb"], entry["rule"], entry["params"]) == (f"{name}@2", "mutate", "merge", params)
    assert entry["parents"] == [f"{name}@1", f"{name}-b@1"]
    assert entry["norms"]["wkv"]["distance"] > 0
    found = whole.http.get(f"/v1/states/{name}@1/diff/{name}@2").json()["families"]
    assert len(found["wkv"]) == 6 and max(found["wkv"]) > 0
    assert not any(found["shift_att"]) and not any(found["shift_ffn"])  # all but matrices is self's
    assert not any(whole.http.get(f"/v1/states/{name}@1/diff/{name}@1").json()["families"]["wkv"])
    assert complete(whole, prompt=" So", state=f"{name}@1", max_tokens=6)["choices"][0]["text"] == before
    assert complete(whole, prompt=" So", state=f"{name}@2", max_tokens=6)["wkvm"]["reuse"] == "state"
    forgot = {"rule": "zero", "name": f"{name}-z"}
    assert whole.http.post(f"/v1/states/{name}/mutate", json=forgot).json()["norms"]["wkv"]["after"] == 0.0


def test_a_mutation_that_cannot_be_leaves_nothing(whole: Api, name: str) -> None:
    complete(whole, save_as=name)
    path = f"/v1/states/{name}/mutate"
    free = [line for line in whole.http.get("/metrics").text.splitlines() if line.startswith("wkvm_host_blocks_free")]
    for body, expected in (
        ({"rule": "melt"}, (400, "rule")),
        ({"rule": "decay"}, (400, "params")),
        ({"rule": "decay", "params": {"alpha": 0.5, "layers": [99]}}, (400, "layers")),
        ({"rule": "merge", "params": {"other": "nobody", "weight": 0.5}}, (404, "state")),
        ({"rule": "decay", "params": {"alpha": 0.5}, "name": "a@1"}, (400, "name")),
    ):
        assert refused(whole, "POST", path, json=body) == expected
    assert refused(whole, "GET", f"/v1/states/{name}/diff/nobody") == (404, "state")
    assert [entry["id"] for entry in whole.http.get("/v1/states", params={"name": name}).json()["data"]] == [
        f"{name}@1"
    ]
    assert eventually(lambda: all(line in whole.http.get("/metrics").text for line in free))


def test_forks_are_states_of_their_own(whole: Api, name: str) -> None:
    complete(whole, save_as=name)
    made = whole.http.post(f"/v1/states/{name}/fork", json={"count": 3})
    assert made.status_code == 201
    assert [entry["id"] for entry in made.json()["data"]] == [f"{name}@{version}" for version in (2, 3, 4)]
    others = whole.http.post(f"/v1/states/{name}@1/fork", json={"names": [f"{name}-a", f"{name}-b"]}).json()["data"]
    assert [entry["id"] for entry in others] == [f"{name}-a@1", f"{name}-b@1"]
    assert {(entry["verb"], *entry["parents"]) for entry in others} == {("fork", f"{name}@1")}
    gone = whole.http.delete(f"/v1/states/{name}", params={"all": "true"}).json()
    assert gone["states"] == [f"{name}@{version}" for version in (4, 3, 2, 1)]
    assert complete(whole, state=f"{name}-a")["wkvm"]["reuse"] == "state"


def test_lists_are_paged_newest_first_and_filtered(whole: Api, name: str) -> None:
    complete(whole, save_as=f"{name}-x")
    whole.http.post(f"/v1/states/{name}-x/fork", json={"names": [f"{name}-{number}" for number in range(5)]})
    found, after, pages = [], "0", 0
    while after:
        query = {"prefix": f"{name}-", "limit": "2", "after": after}
        page = whole.http.get("/v1/states", params=query).json()
        found += [entry["id"] for entry in page["data"]]
        assert page["has_more"] == (page["after"] is not None)
        after, pages = page["after"], pages + 1
    assert found == [*(f"{name}-{number}@1" for number in (4, 3, 2, 1, 0)), f"{name}-x@1"]
    assert pages == 3
    only = whole.http.get("/v1/states", params={"name": f"{name}-3"}).json()["data"]
    assert [entry["id"] for entry in only] == [f"{name}-3@1"]


def test_a_dropped_version_is_never_issued_again(whole: Api, name: str) -> None:
    complete(whole, save_as=name)
    whole.http.delete(f"/v1/states/{name}@1")
    assert complete(whole, save_as=name)["wkvm"]["state"] == f"{name}@2"
    assert refused(whole, "GET", f"/v1/states/{name}@1") == (404, "state")


@pytest.mark.parametrize(
    ("method", "path", "json", "expected"),
    [
        ("GET", "/v1/states/nobody", None, (404, "state")),
        ("GET", "/v1/states/nobody@3", None, (404, "state")),
        ("DELETE", "/v1/states/nobody", None, (404, "state")),
        ("POST", "/v1/states/nobody/fork", {}, (404, "state")),
        ("GET", "/v1/states/.hidden", None, (400, "state")),
        ("GET", "/v1/states/a@0", None, (400, "state")),
        ("GET", "/v1/states?limit=0", None, (400, "limit")),
        ("GET", "/v1/states?limit=many", None, (400, "limit")),
        ("GET", "/v1/states?colour=red", None, (400, None)),
        ("GET", "/v1/states?name=a&name=b", None, (400, None)),
        ("GET", "/v1/states?&&", None, (400, None)),
        ("POST", "/v1/states/a/fork", {"count": 0}, (400, "count")),
        ("POST", "/v1/states/a/fork", {"count": 4097}, (400, "count")),
        ("POST", "/v1/states/a/fork", {"names": ["b"], "count": 2}, (400, "names")),
        ("POST", "/v1/states/a/fork", {"names": ["../b"]}, (400, "names")),
        ("POST", "/v1/states", {}, (400, "prompt")),
        ("POST", "/v1/states", {"prompt": ""}, (400, "prompt")),
        ("POST", "/v1/states", {"prompt": [4096]}, (400, "prompt")),
        ("POST", "/v1/states", {"prompt": "x", "name": "a@1"}, (400, "name")),
        ("POST", "/v1/states", {"prompt": "x", "from": "a b"}, (400, "from")),
        ("POST", "/v1/states", {"from": "nobody"}, (404, "state")),
        ("POST", "/v1/states", {"prompt": "x", "from": "nobody"}, (404, "state")),
        ("POST", "/v1/states", {"prompt": "x", "colour": "red"}, (400, None)),
        ("POST", "/v1/states/nobody/append", {"prompt": "x"}, (404, "state")),
        ("POST", "/v1/states/nobody/append", {}, (400, None)),
        ("POST", "/v1/completions", {"prompt": "x", "state": "nobody"}, (404, "state")),
        ("POST", "/v1/completions", {"prompt": "x", "state": "a b"}, (400, "state")),
        ("POST", "/v1/completions", {"prompt": "x", "save_as": "a@1"}, (400, "save_as")),
        ("POST", "/v1/completions", {"prompt": "x", "save_as": "a", "n": 2}, (400, "save_as")),
        ("POST", "/v1/completions", {"prompt": ["x", "y"], "save_as": "a"}, (400, "save_as")),
    ],
)
def test_what_cannot_be_is_refused_and_named(
    whole: Api, method: str, path: str, json: Any, expected: tuple[int, str | None]
) -> None:
    assert refused(whole, method, path, json=json) == expected
