"""What a load process is told and what it tells back: msgpack frames, each after its length in four bytes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Job(msgspec.Struct, frozen=True):
    """One process's share of the load."""

    host: str
    port: int
    tls: bool
    authority: str
    """Of the Host header."""
    path: str
    """Of the URL, before `/v1`."""
    api_key: str
    endpoint: str
    """`chat` or `completions`."""
    model: str
    concurrency: int
    """Conversations at a time; 0 = they begin at `rate`."""
    rate: float
    """Conversations a second, beginning at random (Poisson)."""
    conversations: int
    """0 = until `duration_s`."""
    duration_s: float
    """No conversation begins later; 0 = no limit."""
    turns: int
    warmup: int
    """Requests sent before the clock starts."""
    words: int
    """Of a user's message."""
    output_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    timeout_s: float
    """Of a request."""


class Result(msgspec.Struct, frozen=True, array_like=True):
    """One request. Moments are those of the machine's monotonic clock, in seconds."""

    started: float
    first: float
    """Arrival of the first token; 0 = none came."""
    last: float
    """Arrival of the last token."""
    ended: float
    tokens: int
    """Generated, as the server counts them, else events with text."""
    prompt_tokens: int
    """As the server counts them; 0 = it does not say."""
    gaps: bytes
    """f32 column: seconds between one token's arrival and the next one's."""
    failure: str = ""
    """Kind of failure; empty = a whole answer came."""
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The warm-up is done; waits for a line on standard input."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """So far, of this process."""

    requests: int
    failures: int
    tokens: int


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Every request, at the end."""

    results: tuple[Result, ...]


Report: TypeAlias = Ready | Progress | Results

encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode


def framed(report: Report) -> bytes:
    """The bytes of a report on the pipe."""
    body = encode_report(report)
    return len(body).to_bytes(4, "little") + body
