"""Several cores: which one takes a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from wkvm_frontend.failure import ApiError, unavailable
from wkvm_frontend.served import ServedModel
from wkvm_frontend.wire.link import CoreLink, LinkTiming
from wkvm_proto.messages import Metrics, ModelCard
from wkvm_proto.names import ErrorCode

logger = logging.getLogger("wkvm.api")


class Fleet:
    """The links to all cores. Open it before use, close it at the end."""

    def __init__(self, uris: Sequence[str], frontend: str, metrics: Callable[[], Metrics], timing: LinkTiming) -> None:
        self.links = [CoreLink(uri, frontend, _load, metrics, timing) for uri in uris]
        self._io: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Begins to connect; returns at once."""
        self._io = zmq.asyncio.Context()
        self._tasks = [asyncio.create_task(link.run(self._io)) for link in self.links]

    async def close(self) -> None:
        """Says goodbye and closes the sockets; what is in flight ends."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("a core's link ended badly", exc_info=outcome)
        if self._io is not None:
            self._io.term()

    @property
    def ready(self) -> list[CoreLink]:
        """Links that can take requests."""
        return [link for link in self.links if link.ready]

    def models(self) -> dict[str, ServedModel]:
        """Served models by name. Raises ApiError 503 while no core is ready."""
        found = {link.card.name: link.model for link in self.ready if link.card and link.model}
        if not found:
            raise unavailable(self._trouble())
        return found

    def pick(self, name: str | None) -> CoreLink:
        """The least loaded ready core that serves the model; without a name the only model. Raises ApiError 404 for a
        model that no core serves, 503 while it cannot be told or reached."""
        ready = self.ready
        if name is None:
            names = {link.card.name for link in ready if link.card}
            if len(names) > 1:
                raise ApiError(
                    400, "model: name one of " + ", ".join(sorted(names)), code="model_required", param="model"
                )
            serving = ready
        else:
            serving = [link for link in ready if link.card and link.card.name == name]
        if serving:
            return min(serving, key=lambda link: (link.draining, link.load_share))
        known = [link for link in self.links if link.card and (name is None or link.card.name == name)]
        if name is None or known or any(link.card is None for link in self.links):
            raise unavailable(self._trouble())
        raise ApiError(404, f"The model {name[:200]!r} does not exist.", code="model_not_found", param="model")

    async def reach(self, name: str | None, wait_s: float) -> CoreLink:
        """As `pick`; where it would be 503 it waits so long for a core to become ready. Frontends that share a port
        are not ready at the same instant: a client that one of them has told so must not be refused by the next."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self.pick(name)
            except ApiError as error:
                left = deadline - time.monotonic()
                if error.status != 503 or left <= 0:
                    raise
            coming = [link for link in self.links if not link.ready]
            waits = [asyncio.create_task(link.arrival.wait()) for link in coming]
            try:
                await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def fail_all(self, code: ErrorCode, message: str) -> int:
        """Ends every request in flight; their number."""
        return sum(link.fail_all(code, message) for link in self.links)

    def _trouble(self) -> str:
        if any(link.trouble.startswith("loading") for link in self.links):
            return "The model is being loaded. Please try again in a few seconds."
        return "The engine is not available right now. Please try again in a few seconds."


async def _load(card: ModelCard) -> ServedModel:
    return await asyncio.to_thread(ServedModel, card)
