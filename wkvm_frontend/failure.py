"""Every way a request can fail, as the caller sees it: status, OpenAI error shape, headers. The one error mapper."""

from __future__ import annotations

import math

import msgspec

from wkvm_proto.messages import Failed
from wkvm_proto.names import ErrorCode

INTERNAL_MESSAGE = "The server made a mistake. Please quote the request id when you report it."

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    412: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "server_error",
}
_STATUS = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.TOKEN_OUT_OF_RANGE: 400,
    ErrorCode.TOO_MANY_SAMPLES: 400,
    ErrorCode.STATE_NOT_FOUND: 404,
    ErrorCode.FINGERPRINT_MISMATCH: 409,
    ErrorCode.NUMERICS_MISMATCH: 409,
    ErrorCode.KEY_REUSED: 422,
    ErrorCode.STALE_HEAD: 412,
    ErrorCode.BAD_STATE: 422,
    ErrorCode.STATE_DAMAGED: 422,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.DRAINING: 503,
    ErrorCode.SLOW_CONSUMER: 408,
    ErrorCode.NOT_ENOUGH_SLOTS: 503,
    ErrorCode.NOT_ENOUGH_MEMORY: 503,
    ErrorCode.QUOTA_FULL: 507,
    ErrorCode.STORE_DAMAGED: 500,
    ErrorCode.STORE_FULL: 507,
    ErrorCode.STORE_READ_ONLY: 507,
    ErrorCode.NUMERICAL_ERROR: 500,
    ErrorCode.ENGINE_RESTARTED: 503,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: text for the user, kind, the field concerned, a stable code."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error answer."""

    error: ErrorDetail


class ApiError(Exception):
    """A failed request. The message may be shown to the caller: it names only what the caller gave."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param or None
        self.retry_after_s = retry_after_s
        self.retryable = status in (408, 429, 503, 504) if retryable is None else retryable

    @property
    def body(self) -> ErrorBody:
        """The answer's body."""
        return ErrorBody(ErrorDetail(self.message, _TYPES.get(self.status, "server_error"), self.param, self.code))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After where waiting helps; `x-should-retry: false` where the same request fails again."""
        headers = []
        if self.status in (429, 503):
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s or 1.0))))
        if not self.retryable:
            headers.append((b"x-should-retry", b"false"))
        return headers


def bad_request(message: str, param: str | None = None, code: str = "bad_request") -> ApiError:
    """The caller's mistake: 400."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, retry_after_s: float = 2.0) -> ApiError:
    """No engine for this request now: 503."""
    return ApiError(503, message, code=ErrorCode.ENGINE_UNAVAILABLE, retry_after_s=retry_after_s)


def internal_error() -> ApiError:
    """A fault of ours: nothing of it is shown."""
    return ApiError(500, INTERNAL_MESSAGE, code=ErrorCode.INTERNAL, retryable=False)


def from_core(failed: Failed) -> ApiError:
    """What a core's failure is to the caller. Codes between programs are faults of ours."""
    status = _STATUS.get(failed.code)
    if status is None:
        return internal_error()
    return ApiError(
        status,
        failed.message,
        code=failed.code,
        param=failed.param,
        retry_after_s=failed.retry_after_s,
        retryable=True if failed.code is ErrorCode.NUMERICAL_ERROR else None,
    )
