"""Whoever waits for a request's outcomes, and the tray on which a frontend's tokens of one step are gathered."""

from __future__ import annotations

from array import array

from wkvm_proto.messages import TokenLogprobs


class Tray:
    """The rows of one step for one frontend."""

    __slots__ = ("client", "ids", "logprobs", "requests", "samples")

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.clear()

    def clear(self) -> None:
        """Empty for the next step."""
        self.requests: array[int] = array("I")
        self.samples: array[int] = array("I")
        self.ids: array[int] = array("I")
        self.logprobs: list[TokenLogprobs] = []


class Caller:
    """One request of one frontend, under the frontend's own number."""

    __slots__ = ("arrived", "last_token", "num_prompt", "parents", "save_as", "tray", "wire")

    def __init__(self, tray: Tray, wire: int, arrived: float, n: int) -> None:
        self.tray = tray
        self.wire = wire
        self.arrived = arrived
        self.last_token: list[float] = [0.0] * n
        """By sample: when its last token went out; 0 = none yet. Seconds."""
        self.save_as = ""
        self.parents: tuple[str, ...] = ()
        """Handle of the state it starts from, if any."""
        self.num_prompt = 0
        """Tokens of the prompt with those of the state it starts from."""
