"""A frontend for the benchmarks: a process of its own that submits requests and counts what comes back."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

import zmq

from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import (
    PROTOCOL,
    Failed,
    Finished,
    Generate,
    Hello,
    Ping,
    Tokens,
    Vocabulary,
    Welcome,
    decode_event,
    encode,
)
from wkvm_proto.sampling import Sampling
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_message


def main() -> None:
    """Keeps `--rows` requests running until each got `--tokens` tokens, then writes the tokens per second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.0, help="send new prompts for so long instead")
    given = parser.parse_args()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, b"\x01" + secrets.token_bytes(15))
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(given.address)
    vocab_size = _hello(socket)
    sampling = Sampling(max_tokens=given.tokens, temperature=given.temperature, top_p=given.top_p, seed=1)
    if given.seconds:
        _flood(socket, given, vocab_size, sampling)
        return
    for request in range(given.rows):
        prompt = [(31 * request + 7 * place) % (vocab_size - 1) + 1 for place in range(given.prompt)]
        socket.send(encode(Generate(request, "bench", pack_u32(prompt), sampling)))
    done = tokens = 0
    next_ping = 0.0
    while done < given.rows:
        if time.monotonic() >= next_ping:
            next_ping = time.monotonic() + 0.5
            socket.send(encode(Ping(1)))
        event = decode_event(socket.recv())
        if isinstance(event, Tokens):
            tokens += len(event.ids) // 4
        elif isinstance(event, Finished):
            done += 1
        elif isinstance(event, Failed):
            sys.exit(f"a request failed: {event.message}")
    if tokens != given.rows * given.tokens:
        sys.exit(f"{tokens} tokens came, {given.rows * given.tokens} were asked for")


def _hello(socket: zmq.Socket[bytes]) -> int:
    socket.send(encode(Hello(PROTOCOL, "bench", 1)))
    welcome = _welcome(socket)
    size = welcome.card.vocab_size
    table: Vocabulary = vocabulary_message([bytes([token % 256]) for token in range(size)])
    socket.send(encode(Hello(PROTOCOL, "bench", 1, vocabulary_digest(table))))
    if _welcome(socket).wants_vocabulary:
        socket.send(encode(table))
        _welcome(socket)
    return size


def _welcome(socket: zmq.Socket[bytes]) -> Welcome:
    while True:
        event = decode_event(socket.recv())
        if isinstance(event, Welcome):
            return event


def _flood(socket: zmq.Socket[bytes], given: argparse.Namespace, vocab_size: int, sampling: Sampling) -> None:
    """One long prompt after another."""
    prompt = pack_u32([7 * place % (vocab_size - 1) + 1 for place in range(given.prompt)])
    end = time.monotonic() + given.seconds
    request = 0
    while time.monotonic() < end:
        socket.send(encode(Generate(request, "flood", prompt, sampling)))
        socket.send(encode(Ping(1)))
        while not isinstance(decode_event(socket.recv()), Finished | Failed):
            pass
        request += 1
    print(request)


if __name__ == "__main__":
    main()
