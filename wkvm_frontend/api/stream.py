"""An answer sent as it grows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from starlette.types import Scope, Send

from wkvm_frontend.api.body import ClientGone
from wkvm_frontend.api.choice import Choice
from wkvm_frontend.api.fields import StreamOptions
from wkvm_frontend.api.form import DONE, KEEP_ALIVE, NO_USAGE, NULL_USAGE, Form, json_of
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.service import Service
from wkvm_frontend.api.shapes import Usage, usage_of
from wkvm_frontend.api.whole import state_facts
from wkvm_frontend.chat.answer import Piece
from wkvm_frontend.failure import ApiError, from_core, internal_error
from wkvm_frontend.wire.inbox import Item, Row
from wkvm_proto.messages import Failed, Finished
from wkvm_proto.names import ErrorCode, FinishReason

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
logger = logging.getLogger("wkvm.api")

ABORT = "wkvm.abort"
"""Extension of the scope: closes the connection without waiting for its reader."""


class EventStream:
    """Sends the events of a generation. One event a token; one write carries all that has come since the last."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        form: Form,
        choices: Sequence[Choice],
        prompt_ids: Sequence[list[int]] | None,
        options: StreamOptions | None,
    ) -> None:
        self._service = service
        self._generation = generation
        self._form = form
        self._choices = choices
        self._prompt_ids = prompt_ids
        self._with_usage = bool(options and options.include_usage)
        self._continuous = self._with_usage and bool(options and options.continuous_usage_stats)
        self._samples = 1
        self._abort: Callable[[], None] | None = None
        self._sent_at = time.monotonic()
        self._sending = False
        self._silent = False

    async def run(self, scope: Scope, send: Send, samples: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Sends head, events and end; `samples` choices a call. Returns early when the client leaves."""
        self._samples = samples
        self._abort = scope.get("extensions", {}).get(ABORT, {}).get("abort")
        self._service.pulse.streams.add(self)
        self._service.meter.move("wkvm_http_streams_open", 1)
        try:
            await self._write(
                send, {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]}
            )
            await self._events(send)
        except ClientGone:
            return
        finally:
            self._service.pulse.streams.discard(self)
            self._service.meter.move("wkvm_http_streams_open", -1)

    async def _events(self, send: Send) -> None:
        opening = [self._opening(place, choice) for place, choice in enumerate(self._choices)]
        await self._send(send, b"".join(opening))
        unfinished = len(self._choices)
        while unfinished:
            items = await self._generation.take()
            out: list[bytes] = []
            error: ApiError | None = None
            for call, item in items:
                try:
                    if isinstance(item, Finished):
                        unfinished -= 1
                    error = self._add(out, call, item)
                except Exception:  # an id that the vocabulary does not have, or a fault of ours: the client is told
                    logger.exception("a stream of %s ended", self._form.answer_id)
                    error = internal_error()
                if error is not None:
                    break
            if error is not None:
                out += [b"data: " + json_of(error.body) + b"\n\n", DONE]
                await self._send(send, b"".join(out), last=True)
                return
            if self._silent and not out:
                out.append(KEEP_ALIVE)
            self._silent = False
            if out:
                await self._send(send, b"".join(out))
        facts = state_facts(self._generation, self._choices)
        last = [] if facts is None else [self._form.facts(facts)]
        if self._with_usage:
            last.append(self._form.usage(self._total()))
        await self._send(send, b"".join([*last, DONE]), last=True)

    def _opening(self, place: int, choice: Choice) -> bytes:
        ids = self._prompt_ids[place // self._samples] if self._prompt_ids is not None else None
        return self._form.opening(choice, self._usage(), ids)

    def _add(self, out: list[bytes], call: int, item: Item) -> ApiError | None:
        """Appends the events of one item; the error when it is the end."""
        if isinstance(item, Row):
            choice = self._choices[call * self._samples + item.sample]
            if choice.traced:
                for place in range(len(item.ids)):
                    out += self._deltas(choice, choice.feed_traced(item, place))
            else:
                for token in item.ids:
                    out += self._deltas(choice, choice.feed(token))
            self._generation.delivered_tokens += len(item.ids)
            return None
        if isinstance(item, Failed):
            if item.code is ErrorCode.SLOW_CONSUMER:
                self._service.meter.add("wkvm_http_slow_consumers_total")
            return from_core(item)
        if isinstance(item, Finished):
            if item.reason is FinishReason.CANCELLED:
                return internal_error()
            choice = self._choices[call * self._samples + item.sample]
            out += self._deltas(choice, choice.finish(item))
            out.append(self._form.finish(choice, self._usage()))
        return None

    def _deltas(self, choice: Choice, pieces: list[Piece]) -> list[bytes]:
        usage = self._usage()
        return [self._form.delta(choice, piece, usage) for piece in pieces]

    def _usage(self) -> bytes:
        if self._continuous:
            return b',"usage":' + json_of(self._total())
        return NULL_USAGE if self._with_usage else NO_USAGE

    def _total(self) -> Usage:
        generated = sum(choice.generated_tokens for choice in self._choices)
        return usage_of(self._generation.prompt_tokens, generated, self._generation.cached_tokens)

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if data or last:
            await self._write(send, {"type": "http.response.body", "body": data, "more_body": not last})

    async def _write(self, send: Send, event: dict[str, object]) -> None:
        self._sending = True
        await send(event)
        self._sending = False
        self._sent_at = time.monotonic()

    def beat(self, now: float) -> None:
        """Wakes the stream for a keep-alive comment; ends the connection of a client that reads nothing."""
        silent_s = now - self._sent_at
        settings = self._service.settings
        if self._sending:
            if silent_s > settings.slow_client_s and self._abort is not None:
                self._abort()
        elif silent_s >= settings.keep_alive_s:
            self._silent = True
            self._generation.wake()
