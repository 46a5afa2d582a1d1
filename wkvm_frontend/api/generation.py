"""Prompts of one HTTP request on one core: queued together, watched over, and given up together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from starlette.types import Receive

from wkvm_frontend.api.body import ClientGone
from wkvm_frontend.failure import bad_request, from_core, unavailable
from wkvm_frontend.metrics.meter import Meter, labelled
from wkvm_frontend.wire.calls import Call
from wkvm_frontend.wire.inbox import Inbox, Item, Row
from wkvm_frontend.wire.link import CoreGone, CoreLink, FrameTooLarge
from wkvm_proto.messages import Accepted, Failed, Finished, Generate
from wkvm_proto.names import ErrorCode, FinishReason


class Generation:
    """The calls of one request. Whatever happens, `end` is called, and then no call of it is alive.

    The client's end-of-file cancels the calls at once, whether or not anything is being sent.
    """

    def __init__(self, link: CoreLink, meter: Meter, max_waiting_tokens: int | None) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reuse = ""
        self.delivered_tokens = 0
        """Tokens whose text was handed to the client."""
        self.now = time.monotonic()
        """When the last `take` returned."""
        self._link = link
        self._inbox = Inbox(max_waiting_tokens)
        self._calls: list[Call] = []
        self._backlog: list[tuple[int, Item]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._over = False
        self._began = self.now
        self._meter = meter
        self._model = link.card.name if link.card else ""
        self.is_invariant = link.card is not None and link.card.deterministic
        self._first = meter.histogram(labelled("wkvm_http_time_to_first_token_seconds", model_name=self._model))
        self._between = meter.histogram(labelled("wkvm_http_inter_token_latency_seconds", model_name=self._model))
        self._seen: dict[tuple[int, int], float] = {}

    async def start(self, generates: Sequence[Generate], receive: Receive, accept_timeout_s: float) -> None:
        """Returns once the core has queued them all. Raises ApiError when it refuses one, ClientGone."""
        try:
            for index, generate in enumerate(generates):
                self._calls.append(self._link.submit(generate, self._inbox, index))
        except CoreGone:
            raise unavailable("The engine is not available right now. Please try again in a few seconds.") from None
        except FrameTooLarge as error:
            raise bad_request(
                f"prompt: {error} bytes of token ids are too many.", code=ErrorCode.PROMPT_TOO_LONG
            ) from None
        self._watcher = asyncio.create_task(self._watch(receive))
        waiting = len(generates)
        try:
            async with asyncio.timeout(accept_timeout_s):
                while waiting:
                    for index, item in await self._inbox.take():
                        if isinstance(item, Accepted):
                            waiting -= 1
                            self.prompt_tokens += item.prompt_tokens
                            self.cached_tokens += item.reused_tokens
                            self.reuse = item.reuse
                        elif isinstance(item, Failed):
                            raise from_core(item)
                        else:
                            self._backlog.append((index, item))
                    if self._inbox.client_left:
                        raise ClientGone
        except TimeoutError:
            raise unavailable("The engine did not answer in time. Please try again in a few seconds.") from None
        counted = self._meter.add
        counted(labelled("wkvm_http_prompt_tokens_total", model_name=self._model), self.prompt_tokens)
        counted(labelled("wkvm_http_cached_tokens_total", model_name=self._model), self.cached_tokens)

    async def take(self) -> list[tuple[int, Item]]:
        """What has come for the calls, by their index. Empty after `wake`. Raises ClientGone."""
        if self._backlog:
            items, self._backlog = self._backlog, []
        else:
            items = await self._inbox.take()
        if self._inbox.client_left:
            raise ClientGone
        self.now = now = time.monotonic()
        for index, item in items:
            if isinstance(item, Row):
                key = (index, item.sample)
                before = self._seen.get(key)
                if before is None:
                    self._first.observe(now - self._began)
                else:
                    self._between.observe((now - before) / len(item.ids), len(item.ids))
                self._seen[key] = now
            elif isinstance(item, Finished):
                self._count_finish(item)
        return items

    def _count_finish(self, item: Finished) -> None:
        reason = "length" if item.reason is FinishReason.LENGTH else "stop"
        add = self._meter.add
        add(labelled("wkvm_http_finished_total", model_name=self._model, finished_reason=reason))
        add(labelled("wkvm_http_generation_tokens_total", model_name=self._model), item.generated_tokens)

    def wake(self) -> None:
        """Lets a waiting `take` return."""
        self._inbox.wake()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._meter.add("wkvm_http_cancelled_total")
            self._cancel()
            self._inbox.leave()

    def _cancel(self) -> None:
        for call in self._calls:
            self._link.cancel(call, self.delivered_tokens)

    async def end(self) -> None:
        """Cancels what is alive and stops watching the client."""
        self._over = True
        self._cancel()
        self._meter.histogram(labelled("wkvm_http_generation_seconds", model_name=self._model)).observe(
            time.monotonic() - self._began
        )
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
