from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_proto.messages import (
    MAX_FRAME_BYTES,
    MAX_SAMPLES,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    PROTOCOL,
    Accepted,
    BadFrame,
    Cancel,
    DiffStates,
    Distances,
    DropState,
    Event,
    Failed,
    Finished,
    ForkState,
    Generate,
    Goodbye,
    Hello,
    Junction,
    ListStates,
    Metrics,
    ModelCard,
    MutateState,
    Ping,
    Pong,
    Refusal,
    Request,
    ShowState,
    StateRecord,
    States,
    Stats,
    TokenLogprobs,
    Tokens,
    Vocabulary,
    Welcome,
    decode_event,
    decode_request,
    encode,
)
from wkvm_proto.names import ErrorCode, FinishReason
from wkvm_proto.sampling import Sampling

GOLDEN = Path(__file__).parent / "golden"

CARD = ModelCard(
    name="m",
    directory="/models/m",
    family="rwkv7",
    vocab_size=4096,
    eos_ids=(0,),
    max_prompt_tokens=100,
    max_output_tokens=200,
    num_slots=8,
    slot_bytes=4096,
    compute_dtype="float32",
    state_dtype="float32",
    deterministic=True,
    fingerprint="a.b.c",
    num_parameters=10,
    created=5,
)
METRICS = Metrics({'a_total{x="y"}': 1.0}, {"g": 2.0}, {"h_seconds": ((1, 2, 3), 4.5)})
REQUESTS: dict[str, Request] = {
    "hello": Hello(PROTOCOL, "api-1", 7, b"d" * 32),
    "vocabulary": Vocabulary(b"\x01\0\0\0\x03\0\0\0", b"abc"),
    "generate": Generate(
        request=3,
        tenant="dev",
        prompt=b"\x01\0\0\0",
        sampling=Sampling(
            max_tokens=5,
            seed=9,
            temperature=0.5,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
            typical_p=0.8,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            bias_ids=b"\x02\0\0\0",
            bias_values=b"\0\0\x80?",
            stop_ids=b"\0\0\0\0",
            min_tokens=1,
            logprobs=2,
        ),
        n=2,
        stop_texts=(b"\n\n",),
        priority=-1,
        timeout_s=2.5,
        junctions=(Junction(1, b"h" * 16),),
        state="s@1",
        save_as="t",
        cache_salt="salt",
        adapter=0,
    ),
    "cancel": Cancel(3, 17),
    "ping": Ping(5, True, METRICS),
    "goodbye": Goodbye(),
    "list_states": ListStates(4, "dev", "chat", "ch", 12, 50),
    "show_state": ShowState(4, "dev", "chat@2"),
    "fork_state": ForkState(4, "dev", "chat", ("a", "b")),
    "drop_state": DropState(4, "dev", "chat", True),
    "mutate_state": MutateState(4, "dev", "chat", "decay", b"\x81\xa5alpha\xcb?\xe0\0\0\0\0\0\0", "calm"),
    "diff_states": DiffStates(4, "dev", "chat@1", "chat@2"),
}
EVENTS: dict[str, Event] = {
    "welcome": Welcome(PROTOCOL, "core", 11, CARD, b"d" * 32, True, 2.0),
    "accepted": Accepted(3, 10, 4, "state"),
    "tokens": Tokens(
        9, b"\x03\0\0\0", b"\x07\0\0\0", b"\x01\0\0\0", b"\x01\0\0\0", (TokenLogprobs(0, b"\0\0\0\0", b"", b""),)
    ),
    "finished": Finished(3, 1, FinishReason.STOP_TEXT, 10, 6, 4, 14, b"ta", b"\n\n", -1, "s@2"),
    "failed": Failed(3, ErrorCode.QUEUE_FULL, "full", "prompt", 2.0),
    "refusal": Refusal(ErrorCode.BAD_FRAME, "no"),
    "pong": Pong(5, 9, True),
    "stats": Stats(METRICS, METRICS, True, 1.5),
    "states": States(4, (StateRecord("chat@2", 17, 4096, 5.5, "fork", ("chat@1",), "host"),), 11),
    "mutated": States(
        4, (StateRecord("a@1", 1, 8, 5.5, "mutate", ("b@1",), "host", "decay", b"\x80", {"wkv": {"before": 1.5}}),)
    ),
    "distances": Distances(4, {"wkv": (0.5, 0.25)}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_bytes_of_protocol_1_requests_still_decode(name: str) -> None:
    assert decode_request((GOLDEN / f"{name}.v1.bin").read_bytes()) == REQUESTS[name]


@pytest.mark.parametrize("name", EVENTS)
def test_bytes_of_protocol_1_events_still_decode(name: str) -> None:
    assert decode_event((GOLDEN / f"{name}.v1.bin").read_bytes()) == EVENTS[name]


@pytest.mark.parametrize("name", [*REQUESTS, *EVENTS])
def test_this_version_writes_the_bytes_of_protocol_1(name: str) -> None:
    assert encode((REQUESTS | EVENTS)[name]) == (GOLDEN / f"{name}.v1.bin").read_bytes()


def test_a_field_of_a_later_protocol_is_skipped() -> None:
    fields = msgspec.msgpack.decode(encode(EVENTS["finished"]))
    later = msgspec.msgpack.encode(fields | {"mood": "fine"})
    assert decode_event(later) == EVENTS["finished"]


def test_a_message_without_its_later_fields_gets_their_defaults() -> None:
    assert decode_request(encode(Generate(1, "t", b"", Sampling(max_tokens=1)))) == Generate(
        1, "t", b"", Sampling(max_tokens=1)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": MAX_SAMPLES + 1},
        {"n": True},
        {"n": 1.0},
        {"stop_texts": [b"x"] * (MAX_STOP_TEXTS + 1)},
        {"stop_texts": [b""]},
        {"stop_texts": [b"x" * (MAX_STOP_TEXT_BYTES + 1)]},
        {"priority": 101},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"request": -1},
        {"request": 2**32},
        {"tenant": 5},
        {"tenant": "t" * 161},
        {"prompt": "text"},
        {"prompt": [1, 2]},
        {"sampling": {}},
        {"sampling": {"max_tokens": -1}},
        {"sampling": {"max_tokens": 5, "temperature": float("nan")}},
        {"sampling": {"max_tokens": 5, "temperature": -0.5}},
        {"sampling": {"max_tokens": 5, "top_p": 1.5}},
        {"sampling": {"max_tokens": 5, "repetition_penalty": 0.0}},
        {"sampling": {"max_tokens": 5, "logprobs": 21}},
        {"sampling": {"max_tokens": 5, "seed": -1}},
        {"type": "generation"},
        {"type": None},
    ],
)
def test_a_field_out_of_its_bounds_makes_a_bad_frame(fields: dict[str, object]) -> None:
    good = msgspec.msgpack.decode(encode(Generate(1, "t", b"", Sampling(max_tokens=1))))
    with pytest.raises(BadFrame):
        decode_request(msgspec.msgpack.encode(good | fields))


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x80", b"\x91" * 50_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xa4\xff\xfe"],
)
def test_bytes_that_are_no_message_are_a_bad_frame(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_request(frame)
    with pytest.raises(BadFrame):
        decode_event(frame)


def test_a_frame_over_the_limit_is_not_even_looked_at() -> None:
    with pytest.raises(BadFrame, match="limit"):
        decode_request(bytes(MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_bad_frame(frame: bytes) -> None:
    for decode in (decode_request, decode_event):
        try:
            decode(frame)
        except BadFrame:
            continue


@given(st.sampled_from(sorted(REQUESTS)), st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_decodes_or_is_a_bad_frame(name: str, place: int, byte: int) -> None:
    frame = bytearray((GOLDEN / f"{name}.v1.bin").read_bytes())
    frame[place % len(frame)] = byte
    try:
        decode_request(bytes(frame))
    except BadFrame:
        return
