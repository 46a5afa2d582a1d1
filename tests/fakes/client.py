"""A frontend for tests: one socket, the real protocol, blocking calls with a time limit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from wkvm_proto.columns import pack_u32, unpack_u32
from wkvm_proto.messages import (
    PROTOCOL,
    Accepted,
    Cancel,
    Event,
    Failed,
    Finished,
    Generate,
    Hello,
    Ping,
    Pong,
    Refusal,
    Request,
    Stats,
    Tokens,
    Vocabulary,
    Welcome,
    decode_event,
    encode,
)
from wkvm_proto.names import ErrorCode
from wkvm_proto.sampling import Sampling
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_message

E = TypeVar("E")

BYTES = [bytes([byte]) for byte in range(256)]
"""The counting model's vocabulary."""


class Client:
    """Collects every event by request; keeps its lease while it is read."""

    def __init__(self, address: str, vocabulary: Sequence[bytes] = BYTES) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IDENTITY, b"\x01" + secrets.token_bytes(15))
        self.socket.connect(address)
        self.vocabulary: Vocabulary = vocabulary_message(vocabulary)
        self.events: list[Event] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.failed: dict[int, Failed] = {}
        self.accepted: dict[int, Accepted] = {}
        self.welcome: Welcome | None = None
        self._next_ping = 0.0
        self._request = 0

    def close(self) -> None:
        """Without a word, as a killed process would."""
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Request) -> None:
        """One frame."""
        self.socket.send(encode(message))

    def poll(self, wait_s: float = 0.05) -> bool:
        """Reads what is there, or waits a little; True if something came."""
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + 0.3
            self.send(Ping(1))
        if not self.socket.poll(int(wait_s * 1000)):
            return False
        while self.socket.poll(0):
            self._take(decode_event(self.socket.recv()))
        return True

    def _take(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Tokens():
                requests, ids = unpack_u32(event.requests), unpack_u32(event.ids)
                counts = unpack_u32(event.counts) or [1] * len(requests)
                samples = unpack_u32(event.samples) or [0] * len(requests)
                start = 0
                for request, sample, count in zip(requests, samples, counts, strict=True):
                    self.tokens.setdefault((request, sample), []).extend(ids[start : start + count])
                    start += count
            case Finished():
                assert (event.request, event.sample) not in self.finished
                self.finished[event.request, event.sample] = event
            case Failed():
                assert event.request not in self.failed
                self.failed[event.request] = event
            case Accepted():
                self.accepted[event.request] = event
            case Welcome():
                self.welcome = event

    def wait(self, condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        """Reads until the condition holds."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"waited {limit_s} s in vain; last events: {self.events[-5:]}"
            self.poll()

    def find(self, kind: type[E]) -> E | None:
        """The newest event of a kind."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    def hello(self) -> Welcome:
        """Introduces itself, and binds the vocabulary."""
        self.send(Hello(PROTOCOL, "test", 1))
        self.wait(lambda: self.welcome is not None)
        self.welcome = None
        self.send(Hello(PROTOCOL, "test", 1, vocabulary_digest(self.vocabulary)))
        self.wait(lambda: self.welcome is not None)
        welcome = self.welcome
        assert welcome is not None
        if welcome.wants_vocabulary:
            self.welcome = None
            self.send(self.vocabulary)
            self.wait(lambda: self.welcome is not None)
        assert self.welcome is not None
        return self.welcome

    def generate(self, prompt: Sequence[int], *, max_tokens: int = 8, n: int = 1, **fields: object) -> int:
        """Submits and returns the request's number."""
        self._request += 1
        sampling = {k: fields.pop(k) for k in list(fields) if k in Sampling.__struct_fields__}
        sampling.setdefault("temperature", 0.0)
        message = Generate(
            self._request,
            "dev",
            pack_u32(prompt),
            Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            n=n,
            **fields,  # type: ignore[arg-type]
        )
        self.send(message)
        return self._request

    def cancel(self, request: int) -> None:
        """Nobody waits for it any more."""
        self.send(Cancel(request))

    def done(self, request: int, n: int = 1) -> bool:
        """It is answered."""
        return request in self.failed or all((request, sample) in self.finished for sample in range(n))

    def probe(self, limit_s: float = 5.0) -> float:
        """Seconds that a round trip through the step loop took."""
        nonce = secrets.randbits(40)
        started = time.monotonic()
        self.send(Ping(nonce, through_loop=True))
        self.wait(lambda: any(isinstance(e, Pong) and e.nonce == nonce for e in self.events[-200:]), limit_s)
        return time.monotonic() - started

    def refused(self, code: ErrorCode, limit_s: float = 20.0) -> Refusal:
        """Waits for a refusal with this code."""
        found: list[Refusal] = []

        def is_there() -> bool:
            found[:] = [e for e in self.events if isinstance(e, Refusal) and e.code is code]
            return bool(found)

        self.wait(is_there, limit_s)
        return found[-1]

    def gauge(self, name: str) -> float:
        """A gauge of the core in the newest Stats."""
        stats = self.find(Stats)
        assert stats is not None
        return stats.core.gauges[name]
