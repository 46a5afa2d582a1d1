"""The mail thread: the only one that touches the socket."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from wkvm_core.daemon.desk import Desk
from wkvm_core.daemon.frontends import MAX_OUTBOX_BYTES, Frontend
from wkvm_proto.messages import MAX_FRAME_BYTES, Event, Metrics, Stats, encode

_HIGH_WATER_FRAMES = 1000
_BURST = 64
"""Frames read before what waits to be sent is looked at again."""
_LEASE_CHECK_S = 0.1


class Mail:
    """Receives frames and gives them to the desk; sends what the step loop posts. Sending never blocks: what a
    frontend does not take waits in its bounded outbox, and beyond the bound its requests fail."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._desk: Desk | None = None
        self._posted: deque[tuple[bytes, bytes]] = deque()
        self._stats: deque[Stats] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._awake = False
        self._stopping = False
        self._backed_up: set[bytes] = set()
        self._bound = threading.Event()
        self._error: BaseException | None = None
        self.cpu_s = 0.0
        """Processor time that the thread has used, seconds."""
        self._thread = threading.Thread(target=self._run, name="wkvm-mail", daemon=True)

    def open(self, desk: Desk) -> None:
        """Binds the socket and starts the thread. Raises zmq.ZMQError when the address cannot be bound."""
        self._desk = desk
        self._thread.start()
        self._bound.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Sends what was posted, for a second at most, and ends the thread."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def post(self, client: bytes, event: Event) -> None:
        """Sends an event to a frontend; it is dropped if the frontend is gone. Any thread."""
        self._posted.append((client, encode(event)))
        self._wake()

    def publish(self, core: Metrics, draining: bool, queue_wait_s: float) -> None:
        """Sends the core's metrics to every frontend, with the sum of theirs. Any thread."""
        self._stats.append(Stats(core, Metrics(), draining, queue_wait_s))
        self._wake()

    def send(self, frontend: Frontend, event: Event) -> None:
        """The desk's way of answering. Mail thread."""
        self._send(frontend, encode(event))

    # ------------------------------------------------------------------------------------------ the thread

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            try:
                os.write(self._wake_write, b"!")
            except BlockingIOError:
                return  # the pipe is full of wake-ups already

    def _run(self) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        try:
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.SNDHWM, _HIGH_WATER_FRAMES)
            self._socket.set(zmq.RCVHWM, _HIGH_WATER_FRAMES)
            self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._socket.set(zmq.LINGER, 1000)
            try:
                before = os.umask(0o077)
                try:
                    self._socket.bind(self._address)
                finally:
                    os.umask(before)
            except BaseException as error:
                self._error = error
                return
            finally:
                self._bound.set()
            self._serve()
        finally:
            self._socket.close()
            context.term()

    def _serve(self) -> None:
        assert self._desk is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_check = self._clock() + _LEASE_CHECK_S
        while True:
            # A frontend that was full a moment ago is tried again soon: ROUTER cannot tell when it takes more.
            timeout_ms = 2 if self._backed_up else max(1, int(1000 * (next_check - self._clock())) + 1)
            ready = dict(poller.poll(timeout_ms))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            # Before looking: whoever posts from here on wakes the thread again.
            self._awake = False
            stopping = self._stopping
            if self._socket in ready:
                self._receive()
            self._flush()
            now = self._clock()
            if now >= next_check:
                self.cpu_s = time.thread_time()
                next_check = now + _LEASE_CHECK_S
                self._desk.expire(now)
            if stopping:
                return

    def _receive(self) -> None:
        assert self._desk is not None
        for _ in range(_BURST):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._desk.receive(parts[0].bytes, parts[1].buffer, self._clock())
            else:
                self._desk.bad_frames += 1

    def _flush(self) -> None:
        assert self._desk is not None
        for identity in list(self._backed_up):
            frontend = self._desk.frontends.get(identity)
            if frontend is None or self._drain(frontend):
                self._backed_up.discard(identity)
        while self._stats:
            stats = self._stats.popleft()
            total = self._desk.frontends.metrics()
            frame = encode(Stats(stats.core, total, stats.draining, stats.queue_wait_s))
            for frontend in self._desk.frontends:
                if frontend.name and not frontend.outbox:
                    self._send(frontend, frame)
        while self._posted:
            client, frame = self._posted.popleft()
            frontend = self._desk.frontends.get(client)
            if frontend is not None:
                self._send(frontend, frame)

    def _send(self, frontend: Frontend, frame: bytes) -> None:
        assert self._desk is not None
        if frontend.outbox or not self._try(frontend, frame):
            if self._desk.frontends.get(frontend.identity) is not frontend:
                return
            frontend.outbox.append(frame)
            frontend.outbox_bytes += len(frame)
            self._backed_up.add(frontend.identity)
            if frontend.outbox_bytes > MAX_OUTBOX_BYTES:
                self._desk.too_slow(frontend)

    def _drain(self, frontend: Frontend) -> bool:
        """Sends what waits; True when nothing does any more."""
        while frontend.outbox:
            if not self._try(frontend, frontend.outbox[0]):
                return False
            if frontend.outbox:
                frontend.outbox_bytes -= len(frontend.outbox.popleft())
        return True

    def _try(self, frontend: Frontend, frame: bytes) -> bool:
        """False when the frontend takes nothing now, or is gone."""
        assert self._desk is not None
        try:
            self._socket.send_multipart((frontend.identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._desk.leave(frontend)
            return False
        return True
