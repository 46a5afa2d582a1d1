"""The server under load: its address, and what is asked of it before the load."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from wkvm_frontend.cli.load.conversation import message
from wkvm_frontend.cli.load.generator import error_of

PROBE_WORDS = (20, 120)


class BenchFailed(Exception):
    """There is nothing to measure; the message says why."""


class Server:
    """An OpenAI-compatible server. Raises ValueError for a URL that is not one of HTTP."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http address")
        self.url = url
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.path = parts.path
        self.api_key = api_key
        self._timeout_s = timeout_s

    def first_model(self) -> str:
        """The first model it lists. Raises BenchFailed."""
        listed = self._ask("GET", "/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise BenchFailed(f"{self.url}/v1/models names no model; give --model") from None

    def words_for(self, tokens: int, model: str, endpoint: str) -> int | None:
        """Words of a message that make a prompt of about `tokens` tokens, by the server's own count of two prompts.
        None when it does not count. Raises BenchFailed."""
        counts = []
        for words in PROBE_WORDS:
            text = message(words, f"probe/{words}")
            base: dict[str, Any] = {"model": model, "max_tokens": 1}
            if endpoint == "chat":
                body, route = base | {"messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"
            else:
                body, route = base | {"prompt": text}, "/v1/completions"
            answer = self._ask("POST", route, body)
            usage = answer.get("usage") if isinstance(answer, dict) else None
            counts.append(int(usage.get("prompt_tokens") or 0) if isinstance(usage, dict) else 0)
        a_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        if a_word <= 0:
            return None
        around = counts[0] - a_word * PROBE_WORDS[0]
        return max(1, round((tokens - around) / a_word))

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connection: http.client.HTTPConnection
        if self.tls:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=self._timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=self._timeout_s)
        try:
            content = None if body is None else msgspec.json.encode(body)
            headers |= {"Content-Type": "application/json"} if content else {}
            connection.request(method, self.path + route, content, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchFailed(f"{self.url}: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise BenchFailed(f"{self.url}{route}: {answer.status} {error_of(data)[1][:300]}")
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise BenchFailed(f"{self.url}{route}: the answer is not JSON") from None
