"""Expected failures: a typed code and a message that may be shown to the caller."""

from __future__ import annotations

from wkvm_proto.names import ErrorCode


class Refused(Exception):
    """A request, a file or a configuration that is not accepted. The message names what is wrong, and no path or
    value that its reader did not give."""

    def __init__(self, code: ErrorCode, message: str, *, param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class DeviceLost(Exception):
    """A sticky device error: nothing on the device can be trusted any more. The core ends with exit code 70."""
