"""What the load says: seeded plain words, so that no two conversations share a beginning."""

from __future__ import annotations

import random
from typing import Any

import msgspec

WORDS = (
    "river", "stone", "window", "garden", "morning", "paper", "candle", "bridge", "winter", "summer", "music",
    "table", "forest", "mountain", "silver", "thunder", "letter", "village", "market", "ocean", "feather", "lantern",
    "harbor", "meadow", "orange", "shadow", "whisper", "journey", "kitchen", "ladder", "mirror", "needle", "pocket",
    "rabbit", "saddle", "temple", "valley", "wagon", "yellow", "anchor", "basket", "castle", "dragon", "engine",
    "flower",
)  # fmt: skip


def message(words: int, seed: str) -> str:
    """So many words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))  # noqa: S311 - text to read, no secret


class Conversation:
    """The turns of one user, as request bodies."""

    def __init__(self, endpoint: str, base: dict[str, Any], words: int, seed: str) -> None:
        assert endpoint in ("chat", "completions"), endpoint
        self._chat = endpoint == "chat"
        self._base = base
        self._words = words
        self._seed = seed
        self._turn = 0
        self._messages: list[dict[str, str]] = []
        self._prompt = ""

    def next_body(self) -> bytes:
        """JSON of the next request."""
        text = message(self._words, f"{self._seed}/{self._turn}")
        self._turn += 1
        if self._chat:
            self._messages.append({"role": "user", "content": text})
            return msgspec.json.encode(self._base | {"messages": self._messages})
        self._prompt += text
        return msgspec.json.encode(self._base | {"prompt": self._prompt})

    def answered(self, text: str) -> None:
        """What came back becomes part of the next request."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._prompt += text + "\n"
