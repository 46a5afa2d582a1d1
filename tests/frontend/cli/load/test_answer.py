from __future__ import annotations

import json

import pytest

from wkvm_frontend.cli.load.answer import Answer


def events(*contents: object, end: str = "\n\n") -> bytes:
    return "".join(f"data: {c if isinstance(c, str) else json.dumps(c)}{end}" for c in contents).encode()


def text(content: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


STREAM = events(
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    text("one"),
    text('two "content":"x" data: [DONE]\n\ndata: {"error"'),
    {"choices": [{"delta": {"reasoning_content": "three"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None},
    {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 4}},
    "[DONE]",
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_cut_anywhere_counts_the_same(size: int) -> None:
    answer = Answer()
    for start in range(0, len(STREAM), size):
        answer.feed(STREAM[start : start + size], 1.0)
    assert (answer.events, answer.prompt_tokens, answer.completion_tokens) == (3, 12, 4)
    assert answer.tokens == 4
    assert answer.ended
    assert not answer.error
    assert len(answer.gaps) == 2


def test_line_ends_of_http_are_read_too() -> None:
    answer = Answer()
    answer.feed(events(text("a"), text("b"), "[DONE]", end="\r\n\r\n"), 1.0)
    assert (answer.events, answer.ended) == (2, True)


def test_completions_events_count_by_their_text() -> None:
    answer = Answer()
    answer.feed(events({"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}), 1.0)
    assert answer.events == 1
    assert answer.tokens == 1


def test_times_are_those_of_arrival_and_tokens_that_came_together_have_no_gap() -> None:
    answer = Answer()
    answer.feed(events({"choices": [{"delta": {"content": ""}}]}), 0.5)
    answer.feed(events(text("a")), 1.0)
    answer.feed(events(text("b"), text("c")), 3.0)
    assert (answer.first, answer.last) == (1.0, 3.0)
    assert list(answer.gaps) == [2.0, 0.0]


def test_an_error_event_is_kept() -> None:
    answer = Answer()
    answer.feed(events(text("a"), {"error": {"message": "it broke"}}), 1.0)
    assert b"it broke" in answer.error
    assert not answer.ended


def test_the_text_is_put_together_from_either_kind_of_event() -> None:
    chat, plain = Answer(keep_text=True), Answer(keep_text=True)
    chat.feed(events(text("to "), text('"be"\n'), {"choices": [], "usage": {"prompt_tokens": 1}}, "[DONE]"), 1.0)
    plain.feed(events({"choices": [{"text": "to "}]}, {"choices": [{"text": '"be"\n'}]}, "[DONE]"), 1.0)
    assert chat.text() == plain.text() == 'to "be"\n'
