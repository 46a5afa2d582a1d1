"""How much waits, how fast it drains, and therefore how long a refused caller should stay away."""

from __future__ import annotations

from wkvm_core.sched.request import Request

_FIRST_GUESS_TOKENS = 256.0
_OUTPUT_WEIGHT = 0.05
_RATE_HALF_LIFE_S = 5.0


class Backlog:
    """Requests and estimated tokens in the queue, the mean output length, the drain rate in tokens per second."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0.0
        self._mean_output = _FIRST_GUESS_TOKENS
        self._rate = 0.0
        self._mark: float | None = None
        self._since_mark = 0

    def estimate(self, request: Request) -> float:
        """Tokens that a request is expected to cost."""
        return request.prompt_tokens + request.n * min(request.sampling.max_tokens, self._mean_output)

    def enter(self, estimate: float) -> None:
        """A request waits."""
        self.requests += 1
        self.tokens += estimate

    def leave(self, estimate: float) -> None:
        """It waits no more."""
        self.requests -= 1
        self.tokens = max(self.tokens - estimate, 0.0)

    def ended(self, output_tokens: int) -> None:
        """A sample ended after so many tokens."""
        self._mean_output += _OUTPUT_WEIGHT * (output_tokens - self._mean_output)

    def drained(self, tokens: int, now: float) -> None:
        """A step took so many tokens; `now` in seconds."""
        if self._mark is None:
            self._mark = now
        self._since_mark += tokens
        elapsed = now - self._mark
        if elapsed >= 0.5:
            fresh = self._since_mark / elapsed
            keep = 0.5 ** (elapsed / _RATE_HALF_LIFE_S)
            self._rate = fresh if self._rate == 0.0 else keep * self._rate + (1.0 - keep) * fresh
            self._mark, self._since_mark = now, 0

    def idle(self) -> None:
        """Nothing runs: the time until the next step says nothing of the rate."""
        self._mark, self._since_mark = None, 0

    @property
    def wait_s(self) -> float:
        """Expected seconds until a request submitted now gets its turn: 1 to 60 when something waits."""
        if not self.requests:
            return 0.0
        return min(max(self.tokens / self._rate, 1.0), 60.0) if self._rate > 0.0 else 1.0
