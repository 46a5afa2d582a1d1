"""What a frontend's message leads to: handshake, requests, leases. Runs on the mail thread."""

from __future__ import annotations

from collections.abc import Callable

from wkvm_core.daemon.frontends import Frontend, Frontends
from wkvm_core.daemon.inbox import Ask, Gone, Inbox, Probe, Withdraw
from wkvm_core.daemon.reception import Reception
from wkvm_core.errors import Refused
from wkvm_core.sched.stops import StopCompiler, VocabularyBytes
from wkvm_proto.messages import (
    PROTOCOL,
    BadFrame,
    Cancel,
    DiffStates,
    DropState,
    Event,
    Failed,
    ForkState,
    Generate,
    Goodbye,
    Hello,
    ListStates,
    ModelCard,
    MutateState,
    Ping,
    Pong,
    Refusal,
    ShowState,
    Vocabulary,
    Welcome,
    decode_request,
)
from wkvm_proto.names import ErrorCode
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_table

Send = Callable[[Frontend, Event], None]


class Desk:
    """Answers what needs no step; hands the rest to the inbox. The vocabulary that comes first binds for life."""

    def __init__(self, card: ModelCard, core: str, epoch: int, lease_s: float, inbox: Inbox, send: Send) -> None:
        self.frontends = Frontends()
        self.bad_frames = 0
        self._card = card
        self._core = core
        self._epoch = epoch
        self._lease_s = lease_s
        self._inbox = inbox
        self._send = send
        self._reception = Reception(card)
        self._digest = b""

    def receive(self, identity: bytes, frame: bytes | memoryview, now: float) -> None:
        """One frame of a frontend."""
        frontend = self.frontends.meet(identity, now)
        frontend.last_heard = now
        if frontend.banned:
            return
        try:
            message = decode_request(frame)
        except BadFrame as error:
            self.bad_frames += 1
            frontend.bad_frames += 1
            self._send(frontend, Refusal(ErrorCode.BAD_FRAME, str(error)))
            return
        if not frontend.name and not isinstance(message, Hello):
            # New here, or its lease ended meanwhile: either way what it takes for running is not.
            self._send(frontend, Refusal(ErrorCode.NO_HELLO, "say hello first"))
            if isinstance(message, Generate):
                refused = Refused(ErrorCode.NO_HELLO, "the frontend has not said hello")
                self._send(frontend, failed(message.request, refused))
            return
        match message:
            case Hello():
                self._hello(frontend, message)
            case Vocabulary():
                self._vocabulary(frontend, message)
            case Generate():
                self._generate(frontend, message, now)
            case Cancel():
                self._inbox.put(Withdraw(identity, message.request))
            case ListStates() | ShowState() | ForkState() | DropState() | MutateState() | DiffStates():
                self._inbox.put(Ask(identity, message))
            case Ping():
                self._ping(frontend, message)
            case Goodbye():
                self.leave(frontend)

    def expire(self, now: float) -> None:
        """Ends the leases of frontends that have been silent too long."""
        for frontend in self.frontends.silent(now - self._lease_s):
            self.leave(frontend)

    def leave(self, frontend: Frontend) -> None:
        """A frontend is gone: its requests end."""
        if self.frontends.get(frontend.identity) is frontend:
            self.frontends.forget(frontend)
            self._inbox.put(Gone(frontend.identity))

    def too_slow(self, frontend: Frontend) -> None:
        """A frontend does not read: what waits for it is dropped and its requests fail."""
        frontend.outbox.clear()
        frontend.outbox_bytes = 0
        self._inbox.put(Gone(frontend.identity, slow=True))

    def _hello(self, frontend: Frontend, message: Hello) -> None:
        if message.protocol != PROTOCOL:
            text = f"this core speaks protocol {PROTOCOL}, the frontend {message.protocol}"
            self._send(frontend, Refusal(ErrorCode.PROTOCOL_MISMATCH, text))
            return
        frontend.name = message.frontend or "unnamed"
        wants = False
        if message.vocabulary:
            if self._digest and message.vocabulary != self._digest:
                text = "the frontend's tokenizer is not the one that this core was started with"
                self._send(frontend, Refusal(ErrorCode.VOCABULARY_MISMATCH, text))
                return
            frontend.bound = message.vocabulary == self._digest
            wants = not self._digest
        self._welcome(frontend, wants)

    def _welcome(self, frontend: Frontend, wants_vocabulary: bool) -> None:
        welcome = Welcome(
            protocol=PROTOCOL,
            core=self._core,
            epoch=self._epoch,
            card=self._card,
            vocabulary=self._digest,
            wants_vocabulary=wants_vocabulary,
            lease_s=self._lease_s,
        )
        self._send(frontend, welcome)

    def _vocabulary(self, frontend: Frontend, message: Vocabulary) -> None:
        digest = vocabulary_digest(message)
        if self._digest and digest != self._digest:
            text = "the frontend's tokenizer is not the one that this core was started with"
            self._send(frontend, Refusal(ErrorCode.VOCABULARY_MISMATCH, text))
        else:
            if not self._digest:
                try:
                    table = vocabulary_table(message)
                    if len(table) > self._card.vocab_size:
                        raise BadFrame(f"{len(table)} tokens; the model has {self._card.vocab_size}")
                except BadFrame as error:
                    self._send(frontend, Refusal(ErrorCode.BAD_FRAME, str(error)))
                    return
                self._digest = digest
                self._reception.bind(StopCompiler(VocabularyBytes(table), self._card.vocab_size))
            frontend.bound = True
            self._welcome(frontend, wants_vocabulary=False)

    def _generate(self, frontend: Frontend, message: Generate, now: float) -> None:
        try:
            if not frontend.bound:
                raise Refused(ErrorCode.NO_HELLO, "say hello with the vocabulary's digest first")
            self._inbox.put(self._reception.receive(message, frontend.tray, now))
        except Refused as refused:
            self._send(frontend, failed(message.request, refused))

    def _ping(self, frontend: Frontend, message: Ping) -> None:
        if message.metrics is not None:
            frontend.metrics = message.metrics
        if message.through_loop:
            self._inbox.put(Probe(frontend.identity, message.nonce))
        else:
            self._send(frontend, Pong(message.nonce, step=-1))


def failed(wire: int, refused: Refused) -> Failed:
    """The message of a refusal."""
    return Failed(wire, refused.code, refused.message, refused.param, refused.retry_after_s)
