"""What the cores have to say to one HTTP request, until its task takes it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, TypeAlias

from wkvm_proto.messages import Accepted, Distances, Failed, Finished, States


class Logprobs(NamedTuple):
    """Log-probabilities of one row's tokens: `chosen[i]`, and for each token its k best as (id, value)."""

    chosen: list[float]
    best: list[list[tuple[int, float]]]


class Row(NamedTuple):
    """Tokens of one sample, in order."""

    sample: int
    ids: list[int]
    logprobs: Logprobs | None = None


Item: TypeAlias = Row | Accepted | Finished | Failed | States | Distances


class Inbox:
    """Events of one or several calls in arrival order, for one reader.

    At most `max_tokens` tokens wait here; the row beyond is refused, so a reader that does not keep up costs bounded
    memory.
    """

    __slots__ = ("_items", "_loop", "_max_tokens", "_tokens", "_waiter", "client_left")

    def __init__(self, max_tokens: int | None = None) -> None:
        self._items: list[tuple[int, Item]] = []
        self._tokens = 0
        self._max_tokens = max_tokens
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.client_left = False

    def put_row(self, call: int, row: Row) -> bool:
        """False when the bound is reached; the row is then not kept."""
        if self._max_tokens is not None and self._tokens + len(row.ids) > self._max_tokens:
            return False
        self._tokens += len(row.ids)
        self._items.append((call, row))
        self.wake()
        return True

    def put(self, call: int, item: Accepted | Finished | Failed | States | Distances) -> None:
        """Never refused: there are few of them."""
        self._items.append((call, item))
        self.wake()

    def leave(self) -> None:
        """The client has closed its connection."""
        self.client_left = True
        self.wake()

    def wake(self) -> None:
        """Lets a waiting `take` return, with what there is."""
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def take(self) -> list[tuple[int, Item]]:
        """All that has come, at least one item; empty when woken for another reason. One reader at a time."""
        if not self._items and not self.client_left:
            assert self._waiter is None, "an inbox has one reader"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        self._tokens = 0
        return items
