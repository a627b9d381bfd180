"""Streams of tokens from a vLLM server."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from processes import TIMEOUT, Server, Stopped, wait_for


class Stream(threading.Thread):
    """A streaming request in a thread of its own: its tokens, and the time when each came."""

    def __init__(self, server: Server, tokens: list[int], count: int) -> None:
        super().__init__(daemon=True)
        self.begun = time.monotonic()
        self.came: list[tuple[float, int]] = []
        self.cached: int | None = None
        self.error: Exception | None = None
        self._place = urlsplit(server.url).netloc
        self._body = {
            **{"model": "m", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
        }
        self.start()

    def run(self) -> None:
        """Reads the stream to its end."""
        try:
            connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT)
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Stopped(f"HTTP {answer.status}: {answer.read(2000)!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (OSError, http.client.HTTPException, ValueError, Stopped) as error:
            self.error = error

    def _take(self, chunk: dict[str, Any]) -> None:
        now = time.monotonic()
        for choice in chunk["choices"]:
            self.came += [(now, token) for token in choice.get("token_ids") or ()]
        if usage := chunk.get("usage"):
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def tokens(self) -> list[int]:
        """The tokens that came so far."""
        return [token for _, token in self.came]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.came[0][0] - self.begun

    def gap(self, since: float) -> float:
        """The longest time without a token from `since` until now, or to the stream's end."""
        times = [since, *(at for at, _ in self.came if at > since)]
        if self.is_alive():
            times.append(time.monotonic())
        return max((after - before for before, after in zip(times, times[1:], strict=False)), default=0.0)

    def reach(self, count: int) -> None:
        """Waits until `count` tokens have come."""
        wait_for(f"{count} tokens", lambda: len(self.came) >= count, self._alive, pause=0.002)

    def done(self) -> Stream:
        """Waits for the end of the stream. Raises `Stopped` if it broke."""
        self.join(TIMEOUT)
        self._alive()
        return self

    def _alive(self) -> None:
        if self.error is not None:
            raise Stopped(f"a stream broke after {len(self.came)} tokens: {self.error}")
