from __future__ import annotations

import pytest

from wkvm_frontend.failure import from_core
from wkvm_proto.messages import Failed
from wkvm_proto.names import ErrorCode


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.BAD_STATE, 422, "invalid_request_error"),
        (ErrorCode.STATE_DAMAGED, 422, "invalid_request_error"),
        (ErrorCode.FINGERPRINT_MISMATCH, 409, "conflict_error"),
        (ErrorCode.STORE_FULL, 507, "server_error"),
        (ErrorCode.STORE_READ_ONLY, 507, "server_error"),
    ],
)
def test_what_is_wrong_with_a_state_is_told_and_not_to_be_tried_again(code: ErrorCode, status: int, kind: str) -> None:
    error = from_core(Failed(1, code, "what is wrong"))
    assert error.status == status
    assert (error.body.error.code, error.body.error.type) == (code.value, kind)
    assert error.headers == [(b"x-should-retry", b"false")]
