"""The part of the capture agent's control interface that a connector needs.

It is HTTP with JSON over a Unix socket.
"""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any


class Refused(Exception):
    """The agent answered with a problem; `code` is one of the closed set."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code", "internal"))
        super().__init__(f"{self.code}: {problem.get('detail', '')}")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(path: str, method: str, target: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> Any:
    """One request. Raises `Refused`, `OSError`."""
    connection = _Connection(path, timeout)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, target, payload, {"content-type": "application/json"} if payload else {})
        answer = connection.getresponse()
        data = answer.read()
        parsed = json.loads(data) if data else {}
        if answer.status >= 400:
            raise Refused(answer.status, parsed if isinstance(parsed, dict) else {})
        return parsed
    finally:
        connection.close()
