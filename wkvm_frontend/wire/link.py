"""One core: connect, introduce, keep the lease, notice its death, connect again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from wkvm_frontend.chat.template import BadTemplate
from wkvm_frontend.served import ServedModel
from wkvm_frontend.text.tokenizer import BadTokenizer
from wkvm_frontend.wire.calls import Call, CallTable
from wkvm_frontend.wire.inbox import Inbox
from wkvm_proto.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Accepted,
    BadFrame,
    Cancel,
    Distances,
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
    Request,
    StateCall,
    States,
    Stats,
    Tokens,
    Welcome,
    decode_event,
    encode,
)
from wkvm_proto.names import ErrorCode

logger = logging.getLogger("wkvm.api")

HELLO_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
RESTARTED = "The engine restarted, so this answer could not be finished. Please send the request again."


class CoreGone(Exception):
    """The core cannot take this message now."""


class FrameTooLarge(Exception):
    """A message above the limit of the wire."""


class _Lost(Exception):
    """The connection is over; the text says why, for the log."""


class LinkTiming(msgspec.Struct, frozen=True):
    """`silence_s`: a core that says nothing for so long, though asked, is taken for dead."""

    silence_s: float = 2.0


class CoreLink:
    """The connection to one core, and every request in flight on it.

    Promises: a request that was submitted gets its events, or one Failed when the core is lost. One task reads.
    """

    def __init__(
        self,
        uri: str,
        frontend: str,
        load: Callable[[ModelCard], Awaitable[ServedModel]],
        metrics: Callable[[], Metrics],
        timing: LinkTiming,
    ) -> None:
        self.uri = uri
        self.card: ModelCard | None = None
        self.model: ServedModel | None = None
        self.stats: Stats | None = None
        self.trouble = "connecting to the engine"
        self.arrival = asyncio.Event()
        """Set while the core can take requests."""
        self._frontend = frontend
        self._epoch = secrets.randbits(62)
        self._load = load
        self._metrics = metrics
        self._timing = timing
        self._calls = CallTable()
        self._probes: dict[int, asyncio.Future[None]] = {}
        self._welcomes: asyncio.Queue[Welcome] = asyncio.Queue()
        self._socket: zmq.asyncio.Socket | None = None
        self._core_epoch: int | None = None
        self._heard = 0.0

    @property
    def ready(self) -> bool:
        """Whether the core can take requests."""
        return self.arrival.is_set()

    @property
    def load_share(self) -> float:
        """Live samples of this frontend for each slot of the core, and its expected wait in seconds."""
        slots = self.card.num_slots if self.card else 1
        wait = self.stats.queue_wait_s if self.stats else 0.0
        return self._calls.live_samples / max(slots, 1) + wait

    @property
    def draining(self) -> bool:
        """Whether the core has said that it takes no new requests."""
        return self.stats is not None and self.stats.draining

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, message: Generate | StateCall, inbox: Inbox, index: int) -> Call:
        """Sends the request under an id of this link; its events go to `inbox` as those of call `index`. Raises
        CoreGone, FrameTooLarge."""
        if not self.ready:
            raise CoreGone(self.trouble)
        call = self._calls.open(message.n if isinstance(message, Generate) else 0, inbox, index)
        frame = encode(msgspec.structs.replace(message, request=call.request))
        try:
            if len(frame) > MAX_FRAME_BYTES:
                raise FrameTooLarge(len(frame))
            self._send_frame(frame)
        except (CoreGone, FrameTooLarge):
            self._calls.close(call)
            raise
        return call

    def cancel(self, call: Call, delivered_tokens: int) -> None:
        """Nobody waits for the call any more; nothing when it has ended."""
        if self._calls.close(call):
            self._tell(Cancel(call.request, delivered_tokens))

    async def ask(self, message: StateCall, timeout_s: float) -> States | Distances | Failed:
        """The core's answer to a call about states. Raises CoreGone, FrameTooLarge, TimeoutError."""
        inbox = Inbox()
        call = self.submit(message, inbox, 0)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for _, item in await inbox.take():
                        if isinstance(item, States | Distances | Failed):
                            return item
        finally:
            self._calls.close(call)

    def fail_all(self, code: ErrorCode, message: str) -> int:
        """Ends every call of this link with that failure, and tells the core; the number of calls."""
        for request in self._calls.requests():
            self._tell(Cancel(request))
        return self._calls.fail_all(code, message, 1.0)

    async def probe(self, deadline_s: float) -> bool:
        """Whether the core's step loop answers a no-op within the deadline."""
        if not self.ready:
            return False
        nonce = secrets.randbits(62)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._probes[nonce] = answer
        try:
            self._send_frame(encode(Ping(nonce, through_loop=True)))
            async with asyncio.timeout(deadline_s):
                await answer
        except (TimeoutError, CoreGone, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return False
        finally:
            self._probes.pop(nonce, None)
        return True

    # -------------------------------------------------------------------------------------------------- the line

    async def run(self, io: zmq.asyncio.Context) -> None:
        """Holds the connection until cancelled, which says goodbye."""
        backoff = FIRST_BACKOFF_S
        told = ""
        while True:
            began = time.monotonic()
            try:
                await self._hold(io)
            except* _Lost as lost:
                self.trouble = str(lost.exceptions[0])
                if self.trouble != told:  # once, not at every attempt
                    logger.warning("core %s: %s", self.uri, self.trouble)
                told = self.trouble
            backoff = FIRST_BACKOFF_S if time.monotonic() - began > 10.0 else min(2 * backoff, LAST_BACKOFF_S)
            await asyncio.sleep(backoff)

    async def _hold(self, io: zmq.asyncio.Context) -> None:
        """One connection, under an identity of its own; ends by raising."""
        socket = io.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a core that is not there
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.IDENTITY, bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(15))
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket = socket
        self._welcomes = asyncio.Queue()
        said_goodbye = False
        try:
            socket.connect(self.uri)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(socket))
                tasks.create_task(self._watch(monitor))
                tasks.create_task(self._introduce(socket, tasks))
        except asyncio.CancelledError:
            said_goodbye = self.ready
            self._tell(Goodbye())
            raise
        finally:
            self.arrival.clear()
            self._socket = None
            self.stats = None
            lost = self._calls.fail_all(ErrorCode.ENGINE_RESTARTED, RESTARTED, 1.0)
            if lost:
                logger.warning("core %s: %d requests in flight were lost", self.uri, lost)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=200 if said_goodbye else 0)

    async def _introduce(self, socket: zmq.asyncio.Socket, tasks: asyncio.TaskGroup) -> None:
        await socket.send(encode(self._hello()))  # waits until there is a core
        self.trouble = "waiting for the engine's welcome"
        welcome = await self._welcome()
        self._heard = time.monotonic()
        tasks.create_task(self._keep_lease(welcome.lease_s))
        self.card = welcome.card
        self._core_epoch = welcome.epoch
        self.trouble = "loading the model's tokenizer"
        try:
            model = await self._load(welcome.card)
        except (BadTokenizer, BadTemplate) as error:
            raise _Lost(f"its model cannot be used: {error}") from error
        except Exception as error:
            logger.exception("core %s: its model cannot be used", self.uri)
            raise _Lost(f"its model cannot be used: {type(error).__name__}") from error
        self.trouble = "waiting for the engine's welcome"
        self._say(self._hello(model.digest))
        if (await self._welcome()).wants_vocabulary:
            self._say(model.vocabulary)
            await self._welcome()
        self.model = model
        self.trouble = ""
        self.arrival.set()
        logger.info("core %s: serving %s", self.uri, welcome.card.name)

    def _hello(self, digest: bytes = b"") -> Hello:
        return Hello(PROTOCOL, self._frontend, self._epoch, digest)

    async def _welcome(self) -> Welcome:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                return await self._welcomes.get()
        except TimeoutError:
            raise _Lost("no answer to hello") from None

    async def _keep_lease(self, lease_s: float) -> None:
        period = lease_s / 4
        while True:
            self._say(Ping(secrets.randbits(62), metrics=self._metrics()))
            asked = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            # When this process itself was held up, the answers may lie unread: look again later.
            if now - asked < period + 0.5 and now - self._heard > self._timing.silence_s:
                raise _Lost(f"silent for {now - self._heard:.1f} s")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        raise _Lost("connection closed")

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            self._heard = time.monotonic()
            try:
                self._take(frame)
            except BadFrame as error:
                logger.error("core %s: bad frame: %s", self.uri, error)

    def _take(self, frame: bytes) -> None:
        event = decode_event(frame)
        match event:
            case Tokens():
                for call in self._calls.deliver(event):
                    self._tell(Cancel(call.request))
            case Finished():
                self._calls.finish(event)
            case Accepted():
                self._calls.accept(event)
            case Failed() | States() | Distances():
                self._calls.end(event)
            case Pong():
                answer = self._probes.get(event.nonce)
                if event.through_loop and answer is not None and not answer.done():
                    answer.set_result(None)
            case Stats():
                self.stats = event
            case Welcome():
                if self.ready and event.epoch != self._core_epoch:
                    raise _Lost("it has restarted")
                self._welcomes.put_nowait(event)
            case Refusal(code=ErrorCode.BAD_FRAME) if self.ready:
                # One message of ours; its request is answered by its time limit, the others go on.
                logger.error("core %s: it refused a message: %s", self.uri, event.message)
            case Refusal():
                raise _Lost(f"it refused: {event.code}: {event.message}")

    def _say(self, message: Request) -> None:
        try:
            self._send_frame(encode(message))
        except CoreGone as error:
            raise _Lost(str(error)) from None

    def _tell(self, message: Request) -> None:
        try:
            self._send_frame(encode(message))
        except CoreGone:
            logger.debug("core %s: gone before %s", self.uri, type(message).__name__)

    def _send_frame(self, frame: bytes) -> None:
        if self._socket is None:
            raise CoreGone("not connected")
        sent = self._socket.send(frame, zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future), "a send without blocking is done at once, either way"
        error = sent.exception()
        if isinstance(error, zmq.ZMQError):
            raise CoreGone("the engine's queue is full or its connection is closed")
        if error is not None:
            raise error
