"""A core that speaks the real protocol on a real ROUTER socket, and answers with scripted tokens."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from wkvm_proto.columns import pack_f32, pack_u32, unpack_u32
from wkvm_proto.messages import (
    Accepted,
    Cancel,
    Event,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Hello,
    Metrics,
    ModelCard,
    Ping,
    Pong,
    Refusal,
    Stats,
    TokenLogprobs,
    Tokens,
    Vocabulary,
    Welcome,
    decode_request,
    encode,
)
from wkvm_proto.names import ErrorCode, FinishReason
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_table

BYTE_CARD = ModelCard(
    name="counting",
    directory="",
    family="counting",
    vocab_size=256,
    eos_ids=(0,),
    max_prompt_tokens=100_000,
    max_output_tokens=65_536,
    num_slots=8,
    slot_bytes=16,
    compute_dtype="int64",
    state_dtype="int64",
    deterministic=True,
    fingerprint="aa.bb.cc",
    created=1_700_000_000,
)

Script = Callable[[list[int], int], Sequence[int]]
"""(prompt ids, sample) -> the ids that the model would say, before stops and limits."""


def counting(prompt: list[int], sample: int) -> Sequence[int]:
    """Letters that depend on how many tokens were read, and on which."""
    start = len(prompt) + sum(prompt) + sample
    return [97 + (start + place) % 26 for place in range(70_000)]


@dataclass
class _Sample:
    ids: Sequence[int]
    place: int = 0
    text: bytes = b""
    held: list[int] = field(default_factory=list)
    """Sampled, not delivered: they may begin a stop text."""
    over: bool = False


@dataclass
class _Line:
    peer: bytes
    generate: Generate
    samples: list[_Sample]
    due: float


class ScriptedCore:
    """Serves from a thread between `open` and `close`. Set the public attributes at any time.

    Stops, lengths, samples and log-probabilities are honoured as the protocol says; a token that may begin a stop
    text is held back until that is decided.
    """

    def __init__(self, folder: Path, card: ModelCard = BYTE_CARD) -> None:
        self.uri = f"ipc://{folder}/core.sock"
        self.card = card
        self.script: Script = counting
        self.step_s = 0.0
        self.first_token_s = 0.0
        self.refuse: Failed | None = None
        self.fail_after: tuple[int, Failed] | None = None
        """After so many tokens of a request it fails."""
        self.silent = False
        """Takes messages and answers none."""
        self.loop_hangs = False
        self.stats: Stats | None = None
        self.epoch = 1
        self.requests: list[Generate] = []
        self.cancelled: list[tuple[float, Cancel]] = []
        self.frontend_metrics: Metrics | None = None
        self.goodbyes = 0
        self.tokens_sent = 0
        self.table: list[bytes] | None = None
        self._digest = b""
        self._lines: list[_Line] = []
        self._bound: set[bytes] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> ScriptedCore:
        """Binds and serves."""
        self._stop.clear()
        bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(bound,), daemon=True)
        self._thread.start()
        assert bound.wait(5)
        return self

    def close(self) -> None:
        """Ends at once, as a killed process does."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self._lines, self._bound = [], set()

    def restart(self) -> None:
        """A new process: nothing in flight is known any more."""
        self.close()
        self.epoch += 1
        self._digest, self.table = b"", None
        self.open()

    @property
    def live(self) -> int:
        """Requests that it works on."""
        return len(self._lines)

    def say(self, text: str | bytes, then: Sequence[int] = (0,)) -> None:
        """From now on it says this text, byte by byte or in the tokens of its table, and then those ids."""
        data = text.encode() if isinstance(text, str) else text
        self.script = lambda prompt, sample: [*data, *then]

    # ------------------------------------------------------------------------------------------------- the thread

    def _serve(self, bound: threading.Event) -> None:
        io = zmq.Context()
        router = io.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 100_000)
        router.bind(self.uri)
        bound.set()
        last_stats = 0.0
        try:
            while not self._stop.is_set():
                busy = any(line.due <= time.monotonic() for line in self._lines)
                if router.poll(0 if busy else 5):
                    while True:
                        try:
                            peer, frame = router.recv_multipart(zmq.NOBLOCK)
                        except zmq.Again:
                            break
                        self._take(router, peer, frame)
                if self.silent:
                    continue
                self._step(router)
                if time.monotonic() - last_stats > 0.1:
                    last_stats = time.monotonic()
                    mine = Metrics(gauges={"wkvm_requests_running": float(len(self._lines))})
                    stats = self.stats or Stats(mine, self.frontend_metrics or Metrics())
                    for peer in list(self._bound):
                        self._send(router, peer, stats)
        finally:
            router.close(linger=0)
            io.term()

    def _send(self, router: zmq.Socket[bytes], peer: bytes, event: Event) -> None:
        try:
            router.send_multipart([peer, encode(event)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._bound.discard(peer)
            self._lines = [line for line in self._lines if line.peer != peer]

    def _take(self, router: zmq.Socket[bytes], peer: bytes, frame: bytes) -> None:
        request = decode_request(frame)
        if self.silent:
            return
        match request:
            case Hello(vocabulary=digest):
                wants = bool(digest) and not self._digest
                if digest and self._digest and digest != self._digest:
                    self._send(router, peer, Refusal(ErrorCode.VOCABULARY_MISMATCH, "another vocabulary binds"))
                    return
                if digest:
                    self._bound.add(peer)
                self._send(router, peer, Welcome(1, "scripted", self.epoch, self.card, self._digest, wants))
            case Vocabulary():
                self.table = vocabulary_table(request)
                self._digest = vocabulary_digest(request)
                self._send(router, peer, Welcome(1, "scripted", self.epoch, self.card, self._digest))
            case Ping():
                if request.metrics is not None:
                    self.frontend_metrics = request.metrics
                if not (request.through_loop and self.loop_hangs):
                    self._send(router, peer, Pong(request.nonce, 0, request.through_loop))
            case Goodbye():
                self.goodbyes += 1
                self._bound.discard(peer)
            case Cancel():
                self.cancelled.append((time.monotonic(), request))
                self._lines = [
                    line for line in self._lines if (line.peer, line.generate.request) != (peer, request.request)
                ]
            case Generate():
                self._queue(router, peer, request)

    def _queue(self, router: zmq.Socket[bytes], peer: bytes, generate: Generate) -> None:
        if peer not in self._bound:
            self._send(router, peer, Refusal(ErrorCode.NO_HELLO, "say hello first"))
            return
        self.requests.append(generate)
        if self.refuse is not None:
            self._send(router, peer, replace_request(self.refuse, generate.request))
            return
        prompt = list(unpack_u32(generate.prompt))
        self._send(router, peer, Accepted(generate.request, len(prompt)))
        samples = [_Sample(self.script(prompt, sample)) for sample in range(generate.n)]
        self._lines.append(_Line(peer, generate, samples, time.monotonic() + self.first_token_s))

    def _step(self, router: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        rows: dict[bytes, list[tuple[int, int, list[int], int]]] = {}
        endings: list[tuple[bytes, Event]] = []
        for line in [line for line in self._lines if line.due <= now]:
            line.due = now + self.step_s
            if self._must_fail(line, endings):
                continue
            for number, sample in enumerate(line.samples):
                if not sample.over:
                    ids = self._advance(line, number, sample, endings)
                    if ids:
                        rows.setdefault(line.peer, []).append(
                            (line.generate.request, number, ids, line.generate.sampling.logprobs)
                        )
            if all(sample.over for sample in line.samples):
                self._lines.remove(line)
        for peer, of_peer in rows.items():
            self._send(router, peer, self._tokens(of_peer))
        for peer, event in endings:
            self._send(router, peer, event)

    def _must_fail(self, line: _Line, endings: list[tuple[bytes, Event]]) -> bool:
        if self.fail_after is None or line.samples[0].place < self.fail_after[0]:
            return False
        endings.append((line.peer, replace_request(self.fail_after[1], line.generate.request)))
        self._lines.remove(line)
        return True

    def _advance(self, line: _Line, number: int, sample: _Sample, endings: list[tuple[bytes, Event]]) -> list[int]:
        """Samples one token; the ids that may be delivered now."""
        wanted = line.generate
        sampling = wanted.sampling
        table = self.table or []
        ids = sample.ids
        token = ids[sample.place] if sample.place < len(ids) else (self.card.eos_ids or (0,))[0]
        sample.place += 1

        def end(reason: FinishReason, deliver: list[int], **more: object) -> list[int]:
            sample.over = True
            prompt = len(wanted.prompt) // 4
            delivered = sample.place - len(sample.held) - (1 if reason is FinishReason.STOP_TOKEN else 0)
            if reason is FinishReason.STOP_TEXT:
                delivered = more.pop("delivered")  # type: ignore[assignment]
            finished = Finished(
                wanted.request, number, reason, prompt, sample.place, delivered, prompt + delivered, **more
            )  # type: ignore[arg-type]
            endings.append((line.peer, finished))
            return deliver

        if token in unpack_u32(sampling.stop_ids) and sample.place > sampling.min_tokens:
            held, sample.held = sample.held, []
            return end(FinishReason.STOP_TOKEN, held, stop_id=token)
        sample.held.append(token)
        text = b"".join(table[each] for each in sample.held)
        found = min(((text.find(stop), stop) for stop in wanted.stop_texts if stop in text), default=None)
        if found is not None:
            before, size = [], 0
            for each in sample.held:
                if size + len(table[each]) > found[0]:
                    break
                before.append(each)
                size += len(table[each])
            count = sample.place - len(sample.held) + len(before)
            return end(FinishReason.STOP_TEXT, before, delivered=count, tail=text[size : found[0]], stop_text=found[1])
        if sample.place >= sampling.max_tokens:
            held, sample.held = sample.held, []
            return end(FinishReason.LENGTH, held)
        overlap = max(
            (size for stop in wanted.stop_texts for size in range(1, len(stop)) if text.endswith(stop[:size])),
            default=0,
        )
        free, size = 0, 0
        for each in sample.held:
            if size + len(table[each]) > len(text) - overlap:
                break
            size += len(table[each])
            free += 1
        out, sample.held = sample.held[:free], sample.held[free:]
        return out

    def _tokens(self, rows: list[tuple[int, int, list[int], int]]) -> Tokens:
        ids = [token for _, _, tokens, _ in rows for token in tokens]
        self.tokens_sent += len(ids)
        single = all(len(tokens) == 1 for _, _, tokens, _ in rows)
        return Tokens(
            step=1,
            requests=pack_u32(request for request, _, _, _ in rows),
            ids=pack_u32(ids),
            counts=b"" if single else pack_u32(len(tokens) for _, _, tokens, _ in rows),
            samples=pack_u32(sample for _, sample, _, _ in rows) if any(sample for _, sample, _, _ in rows) else b"",
            logprobs=tuple(_logprobs(row, tokens, best) for row, (_, _, tokens, best) in enumerate(rows) if best >= 0),
        )


def _logprobs(row: int, tokens: list[int], best: int) -> TokenLogprobs:
    """The chosen token has probability 1/2, the next ids 1/4, 1/8, ...; the last is banned."""
    top_ids, top = [], []
    for token in tokens:
        for rank in range(best):
            top_ids.append((token + rank) % 256)
            top.append(-math.inf if rank == best - 1 and best > 1 else math.log(0.5 ** (rank + 1)))
    chosen = [math.log(0.5)] * len(tokens)
    return TokenLogprobs(row, pack_f32(chosen), pack_u32(top_ids), pack_f32(top))


def replace_request(failed: Failed, request: int) -> Failed:
    """The same failure of another request."""
    return Failed(request, failed.code, failed.message, failed.param, failed.retry_after_s)
