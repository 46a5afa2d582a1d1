"""Ids, handles, error codes and finish reasons: the words both sides share. Open to every room of the core."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class BadHandle(ValueError):
    """The text is not `name` or `name@version`."""


class StateHandle(msgspec.Struct, frozen=True):
    """The outside name of a snapshot: `name@version`. Versions count from 1; names are 1-128 ASCII characters of
    `[A-Za-z0-9._-]`, case-sensitive, starting with a letter or digit. A name never becomes a path."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def check_name(name: str) -> str:
    """The name itself. Raises BadHandle when it is not a state's name."""
    if _NAME.fullmatch(name) is None:
        raise BadHandle("a state's name is 1-128 characters of A-Z a-z 0-9 . _ - and starts with a letter or digit")
    return name


def parse_handle(text: str) -> tuple[str, int | None]:
    """`(name, version)`; version None means the head of that name. Raises BadHandle."""
    name, at, version = text.partition("@")
    check_name(name)
    if not at:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,17}", version):
        raise BadHandle("a state's version is a whole number from 1")
    return name, int(version)


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP_TOKEN = "stop_token"  # noqa: S105 - a finish reason, not a secret
    STOP_TEXT = "stop_text"
    LENGTH = "length"
    CANCELLED = "cancelled"


class ErrorCode(StrEnum):
    """Stable names of everything that may be refused or fail."""

    # the caller's mistake
    BAD_REQUEST = "bad_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"  # noqa: S105 - an error's name
    TOO_MANY_SAMPLES = "too_many_samples"
    STATE_NOT_FOUND = "state_not_found"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    NUMERICS_MISMATCH = "numerics_mismatch"
    DUPLICATE_REQUEST = "duplicate_request"
    KEY_REUSED = "key_reused"
    STALE_HEAD = "stale_head"
    BAD_STATE = "bad_state"
    STATE_DAMAGED = "state_damaged"
    # capacity and time
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    DRAINING = "draining"
    SLOW_CONSUMER = "slow_consumer"
    NOT_ENOUGH_SLOTS = "not_enough_slots"
    NOT_ENOUGH_MEMORY = "not_enough_memory"
    QUOTA_FULL = "quota_full"
    STORE_FULL = "store_full"
    STORE_READ_ONLY = "store_read_only"
    # the engine's own faults
    NUMERICAL_ERROR = "numerical_error"
    ENGINE_RESTARTED = "engine_restarted"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    STORE_DAMAGED = "store_damaged"
    INTERNAL = "internal"
    # between programs, and at start
    BAD_FRAME = "bad_frame"
    NO_HELLO = "no_hello"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    VOCABULARY_MISMATCH = "vocabulary_mismatch"
    STORE_LOCKED = "store_locked"
    BAD_CONFIG = "bad_config"
    BAD_WEIGHTS = "bad_weights"
