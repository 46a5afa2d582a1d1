"""A frontend for the benchmarks: a process of its own that submits requests and clocks what comes back.

Writes one line of JSON when it ends in good order."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import signal
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zmq

from wkvm_core.bench.arrivals import Arrivals
from wkvm_core.bench.figures import spread
from wkvm_proto.messages import (
    PROTOCOL,
    Event,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Hello,
    Tokens,
    Welcome,
    decode_event,
    encode,
)
from wkvm_proto.sampling import Sampling
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_message

_MARGIN = 1.4
"""Tokens asked for beyond what the wanted time takes: a fifth of the steps is not measured, and steps vary."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--work", choices=["decode", "prefill", "flood"], default="decode")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="output tokens of each request")
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="decode: least time to measure")
    parser.add_argument("--rounds", type=int, default=1, help="prefill: to measure, after one that is not")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    connection = Connection(given.address)
    load = Load(given.rows, given.tokens, given.prompt, given.temperature, given.top_p, given.seed)
    try:
        if given.work == "flood":
            flood(connection, load)
        measured = decode(connection, load, given.seconds) if given.work == "decode" else None
        print(json.dumps(measured or prefill(connection, load, given.rounds)), flush=True)
    finally:
        connection.close()


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once."""

    rows: int
    tokens: int
    prompt: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1

    def request(self, number: int, vocab_size: int) -> Generate:
        """One of them. Neither prompts nor seeds repeat within a round, and other seeds give other prompts."""
        places = np.arange(self.prompt, dtype=np.int64)
        ids = (31 * number + 17 * self.seed + 7 * places) % (vocab_size - 1) + 1
        sampling = Sampling(
            max_tokens=self.tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed + number
        )
        return Generate(number, "bench", ids.astype("<u4").tobytes(), sampling)


class Connection:
    """A frontend that has said hello."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, b"\x01" + secrets.token_bytes(15))
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(address)
        card = self._welcome(Hello(PROTOCOL, "bench", 1)).card
        self.vocab_size, self.max_tokens = card.vocab_size, card.max_output_tokens
        table = vocabulary_message([bytes([token % 256]) for token in range(card.vocab_size)])
        if self._welcome(Hello(PROTOCOL, "bench", 1, vocabulary_digest(table))).wants_vocabulary:
            self._welcome(table)

    def send(self, frame: bytes) -> None:
        """To the core."""
        self._socket.send(frame)

    def receive(self) -> Event:
        """The next event. Ends the process when it is the failure of a request."""
        event = decode_event(self._socket.recv())
        if isinstance(event, Failed):
            sys.exit(f"a request failed: {event.message}")
        return event

    def round(self, load: Load) -> Round:
        """Sends the requests and waits for all their tokens."""
        frames = [encode(load.request(number, self.vocab_size)) for number in range(load.rows)]
        arrivals = Arrivals(load.rows)
        began = time.monotonic()
        for number, frame in enumerate(frames):
            arrivals.sent[number] = time.monotonic()
            self.send(frame)
        while arrivals.finished < load.rows:
            event = self.receive()
            if isinstance(event, Tokens):
                arrivals.take(event, time.monotonic())
            elif isinstance(event, Finished):
                arrivals.finish()
        if arrivals.tokens != load.rows * load.tokens:
            sys.exit(f"{arrivals.tokens} tokens came, {load.rows * load.tokens} were asked for")
        return Round(began, time.monotonic(), arrivals)

    def close(self) -> None:
        """Whatever it asked for and did not get, it does not want any more."""
        self.send(encode(Goodbye()))
        self._socket.close()

    def _welcome(self, message: Any) -> Welcome:
        self.send(encode(message))
        while True:
            event = self.receive()
            if isinstance(event, Welcome):
                return event


@dataclass(frozen=True)
class Round:
    """From the first request sent to the last one's end, seconds on the monotonic clock."""

    began: float
    ended: float
    arrivals: Arrivals


def decode(connection: Connection, load: Load, seconds: float) -> dict[str, float]:
    """One round; when all its rows ran together for less than `seconds`, another one of more tokens: enough for that
    time besides those that the first row gets before the last one begins."""
    done = connection.round(load)
    itl = done.arrivals.itl
    if itl.size and itl.size / load.rows * itl.mean() < seconds:
        ahead = float(np.ptp(done.arrivals.first))
        tokens = min(math.ceil((ahead + _MARGIN * seconds) / itl.mean()), connection.max_tokens)
        done = connection.round(replace(load, tokens=max(tokens, load.tokens), seed=load.seed + load.rows))
        itl = done.arrivals.itl
    if not itl.size:
        sys.exit(f"the {load.rows} requests never ran all together: ask for more --tokens")
    ttft_ms = 1e3 * float(np.median(done.arrivals.ttft))
    return {"began": done.began, "ended": done.ended, "ttft_ms": ttft_ms, **spread("itl", 1e6 * itl)}


def prefill(connection: Connection, load: Load, rounds: int) -> dict[str, Any]:
    """Rounds of one output token; the first one is not told of. TTFT: of the median request and of the last one, the
    median round."""
    done = [connection.round(replace(load, seed=load.seed + place)) for place in range(1 + rounds)][1:]
    return {
        "rounds": [(one.began, one.ended) for one in done],
        "ttft_ms": 1e3 * statistics.median(float(np.median(one.arrivals.ttft)) for one in done),
        "ttft_max_ms": 1e3 * statistics.median(float(one.arrivals.ttft.max()) for one in done),
    }


def flood(connection: Connection, load: Load) -> None:
    """One long prompt after another, until the process is told to end."""
    frame = encode(load.request(0, connection.vocab_size))
    while True:
        connection.send(frame)
        while not isinstance(connection.receive(), Finished):
            pass


if __name__ == "__main__":
    main()
