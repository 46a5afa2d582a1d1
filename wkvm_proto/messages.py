"""Messages between frontend and core: tagged frozen structs in msgpack, one message a frame.

The wire only grows: a field is appended with a default, never reordered, retyped or reused; a decoder skips fields it
does not know; a new message is a new tag. `docs/protocol.md` explains each message, golden files hold old bytes.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from wkvm_proto.names import ErrorCode, FinishReason
from wkvm_proto.sampling import U63, Count, Sampling

PROTOCOL = 1
MAX_FRAME_BYTES = 8 * 2**20
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_SAMPLES = 128
MAX_JUNCTIONS = 65_536
MAX_LISTED_STATES = 1000
MAX_FORKS = 4096
MAX_PARAMS_BYTES = 65_536

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Digest = Annotated[bytes, Meta(max_length=32)]
Name = Annotated[str, Meta(max_length=160)]
StopText = Annotated[bytes, Meta(min_length=1, max_length=MAX_STOP_TEXT_BYTES)]


class BadFrame(ValueError):
    """The bytes are not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every message; each carries its tag under "type"."""


# ------------------------------------------------------------------------------------------- frontend -> core


class Hello(Message, tag="hello", frozen=True):
    """First message of a frontend, and again once it has loaded the tokenizer that the Welcome named.

    A hello without `vocabulary` introduces; with it the digest binds, and generation is allowed from then on.
    """

    protocol: U32
    frontend: Name
    epoch: U63
    """Random for each start of the frontend."""
    vocabulary: Digest = b""
    """blake2b-256 of the id -> bytes table (wkvm_proto.vocabulary)."""


class Vocabulary(Message, tag="vocabulary", frozen=True):
    """The id -> bytes table, sent when a Welcome asks for it: `ends` is a u32 column of end offsets into `data`."""

    ends: bytes
    data: bytes


class Junction(msgspec.Struct, frozen=True, array_like=True):
    """A border between prompt segments: tokens before it, and the chain hash of the messages up to it."""

    end: U32
    digest: Digest = b""


class Generate(Message, tag="generate", frozen=True):
    """Read the prompt, then sample `n` continuations of it. Answered by Accepted or Failed; then Tokens and n Finished,
    or one Failed."""

    request: U32
    tenant: Name
    prompt: bytes
    """u32 column of ids; may be empty only together with `state`."""
    sampling: Sampling
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    stop_texts: Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOP_TEXTS)] = ()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher goes first, and may park a row of a lower one."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """Seconds from arrival at the core until the request fails with `deadline`."""
    junctions: Annotated[tuple[Junction, ...], Meta(max_length=MAX_JUNCTIONS)] = ()
    state: Name = ""
    """Handle to start from; empty = the zero state."""
    save_as: Name = ""
    """Name to keep the end state under (n = 1 only)."""
    cache_salt: Name = ""
    adapter: U32 = 0


class Cancel(Message, tag="cancel", frozen=True):
    """Nobody waits for this request any more. Answered by a Finished with reason `cancelled` for each live sample."""

    request: U32
    delivered_tokens: Count = 0
    """Tokens handed to the client, which stopped reading there."""


class ListStates(Message, tag="list_states", frozen=True):
    """Named states of a tenant, newest first. Answered by States or Failed."""

    request: U32
    tenant: Name
    name: Name = ""
    """Only the versions of this name."""
    prefix: Name = ""
    """Only names that begin so."""
    after: U63 = 0
    """The `after` of the page before; 0 = from the newest."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_STATES)] = 100


class ShowState(Message, tag="show_state", frozen=True):
    """One state, by `name@version` or by name for its head. Answered by States or Failed."""

    request: U32
    tenant: Name
    state: Name


class ForkState(Message, tag="fork_state", frozen=True):
    """New names for a state's snapshot, all of them or none. Answered by States, one record a name, or Failed."""

    request: U32
    tenant: Name
    state: Name
    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_FORKS)]


class DropState(Message, tag="drop_state", frozen=True):
    """Forget a version, or every version of a name. Answered by States with what was forgotten, or Failed."""

    request: U32
    tenant: Name
    state: Name
    every: bool = False


class MutateState(Message, tag="mutate_state", frozen=True):
    """Make a new state of old ones by a rule. Answered by States or Failed."""

    request: U32
    tenant: Name
    state: Name
    rule: Name
    params: Annotated[bytes, Meta(max_length=MAX_PARAMS_BYTES)] = b"\x80"
    """msgpack map"""
    name: Name = ""
    """Of the result; empty = the state's own."""


class DiffStates(Message, tag="diff_states", frozen=True):
    """How far one state is from another. Answered by Distances or Failed."""

    request: U32
    tenant: Name
    one: Name
    other: Name


class Metrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters, gauges and histograms by series name, labels in Prometheus text form: `name{label="value"}`.

    A histogram is its bucket counts (not cumulative; one more than the bounds that `wkvm_proto.buckets` gives for the
    name) and its sum.
    """

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, tuple[tuple[int, ...], float]] = {}


class Ping(Message, tag="ping", frozen=True):
    """Renews the frontend's lease and brings its own metrics; `through_loop` asks for an answer by the step loop."""

    nonce: U63
    through_loop: bool = False
    metrics: Metrics | None = None


class Goodbye(Message, tag="goodbye", frozen=True):
    """The frontend closes in good order: its lease ends now."""


StateCall: TypeAlias = ListStates | ShowState | ForkState | DropState | MutateState | DiffStates
Request: TypeAlias = Hello | Vocabulary | Generate | Cancel | Ping | Goodbye | StateCall

# ------------------------------------------------------------------------------------------- core -> frontend


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a frontend must know of the model a core serves."""

    name: str
    directory: str
    """Where tokenizer and template lie; empty for the built-in counting model."""
    family: str
    """`rwkv7`, `counting`, ..."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_prompt_tokens: int
    max_output_tokens: int
    num_slots: int
    slot_bytes: int
    compute_dtype: str
    state_dtype: str
    deterministic: bool
    fingerprint: str
    """Hex; parts model, layout and numerics joined by dots."""
    num_parameters: int = 0
    created: int = 0
    """Unix seconds at which the core became ready."""


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to Hello."""

    protocol: U32
    core: str
    epoch: U63
    """Random for each start of the core: a changed epoch means that everything in flight is lost."""
    card: ModelCard
    vocabulary: Digest = b""
    """Digest that binds, once known."""
    wants_vocabulary: bool = False
    lease_s: float = 2.5
    """A frontend silent for so long is taken for dead."""


class Accepted(Message, tag="accepted", frozen=True):
    """The request is in the queue."""

    request: U32
    prompt_tokens: int
    """Tokens of this prompt, with those of the state it starts from."""
    reused_tokens: int = 0
    reuse: str = "cold"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one row's tokens in a Tokens frame, of the raw distribution, natural logarithm."""

    row: int
    chosen: bytes
    """f32 column [tokens]."""
    top_ids: bytes = b""
    """u32 column [tokens * k], best first."""
    top: bytes = b""
    """f32 column [tokens * k]."""


class Tokens(Message, tag="tokens", frozen=True):
    """Every token that a step brought to one frontend: one frame a frontend a step, in columns, a row each."""

    step: int
    requests: bytes
    """u32 column [rows]."""
    ids: bytes
    """u32 column, the rows' ids one after another."""
    counts: bytes = b""
    """u32 column [rows]; empty = one id a row."""
    samples: bytes = b""
    """u32 column [rows]; empty = every row is sample 0."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the rows that asked."""


class Finished(Message, tag="finished", frozen=True):
    """A sample ended in good order; the last message about it."""

    request: U32
    sample: U32
    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    """Tokens sampled, those of a stop included."""
    delivered_tokens: int
    """Tokens sent in Tokens frames."""
    consumed_tokens: int
    """Tokens that the state has read, from its origin on."""
    tail: bytes = b""
    """Bytes before a text stop that belong to a token which was not delivered."""
    stop_text: bytes = b""
    stop_id: int = -1
    saved_as: str = ""


class Failed(Message, tag="failed", frozen=True):
    """The request ended without a result; the last message about it and all its samples."""

    request: U32
    code: ErrorCode
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class StateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a named state."""

    handle: str
    """`name@version`"""
    tokens: int
    """That it has read, from the zero state on."""
    size_bytes: int
    created: float
    """Unix seconds."""
    verb: str
    """What made it: `save` at the end of a request, `fork`, `mutate`."""
    parents: tuple[str, ...] = ()
    """Handles that it came from; they may be gone."""
    tier: str = "host"
    """Where its bytes are."""
    rule: str = ""
    """Of a mutation."""
    params: bytes = b""
    """Of that rule, a msgpack map."""
    norms: dict[str, dict[str, float]] = {}
    """Of a mutation, by family: `before`, `after`, and the relative `distance` between."""


class States(Message, tag="states", frozen=True):
    """Answer to a call about states."""

    request: U32
    records: tuple[StateRecord, ...] = ()
    after: U63 = 0
    """For the next page; 0 = this was the last."""


class Distances(Message, tag="distances", frozen=True):
    """Answer to DiffStates: of each family and layer the norm of the difference, relative to the first state's."""

    request: U32
    families: dict[str, tuple[float, ...]]


class Refusal(Message, tag="refusal", frozen=True):
    """A frame that belongs to no request was refused (bad frame, no hello, wrong protocol or vocabulary)."""

    code: ErrorCode
    message: str


class Pong(Message, tag="pong", frozen=True):
    """Answer to Ping."""

    nonce: U63
    step: int
    through_loop: bool = False


class Stats(Message, tag="stats", frozen=True):
    """Sent to every frontend once a second: the core's metrics and the sum of all frontends'."""

    core: Metrics
    frontends: Metrics
    draining: bool = False
    queue_wait_s: float = 0.0
    """Expected wait of a request submitted now, from the drain rate."""


Event: TypeAlias = Welcome | Accepted | Tokens | Finished | Failed | Refusal | Pong | Stats | States | Distances

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Request | Event) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """What a frontend said. Raises BadFrame, never anything else."""
    _check_size(frame)
    try:
        return _requests.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None


def decode_event(frame: bytes | memoryview) -> Event:
    """What the core said. Raises BadFrame, never anything else."""
    _check_size(frame)
    try:
        return _events.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None


def _check_size(frame: bytes | memoryview) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
