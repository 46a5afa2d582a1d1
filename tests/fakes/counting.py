"""The counting model in plain Python integers, one token at a time: predicts every state and token of the real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    x = (value + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class CountingReference:
    """The state after some tokens: their number, and their hash as a u64."""

    count: int = 0
    hash: int = 0

    def read(self, tokens: Iterable[int]) -> CountingReference:
        """The state after `tokens` more."""
        count, digest = self.count, self.hash
        for token in tokens:
            count += 1
            digest = (digest * 0x5851F42D4C957F2D + splitmix64(token)) & MASK
        return CountingReference(count, digest)

    @property
    def next_token(self) -> int:
        """The most probable token in this state."""
        return 32 + (splitmix64(self.hash ^ self.count) >> 32) % 95

    @property
    def words(self) -> tuple[int, int]:
        """The state as the two int64 of a slot."""
        return self.count, self.hash - (1 << 64) if self.hash >> 63 else self.hash

    def generate(self, num_tokens: int) -> tuple[list[int], CountingReference]:
        """Greedy tokens sampled from here, and the state that has read all of them but the last."""
        state, tokens = self, []
        for _ in range(num_tokens):
            if tokens:
                state = state.read(tokens[-1:])
            tokens.append(state.next_token)
        return tokens, state


def greedy(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a prompt read from the zero state."""
    return CountingReference().read(prompt).generate(num_tokens)[0]
