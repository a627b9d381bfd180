"""Messages between an engine and the capture agent.

A message is a `u32` little-endian length, then that many bytes of JSON.

File descriptors travel as `SCM_RIGHTS` with a message's first byte. Only the standard library is
used.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

PROTOCOL = 1
"""Version of the protocol."""
MAX_MESSAGE = 64 << 20
"""Maximum bytes of one message."""
MAX_DESCRIPTORS = 64
"""Maximum file descriptors with one message."""

_LENGTH = struct.Struct("<I")
_STEP = 1 << 20


class Source(Protocol):
    """What messages are read from: a socket, or something like it."""

    def recv(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


class WireError(Exception):
    """The other side broke the protocol, or the connection broke."""


class Failure(Exception):
    """A call failed; nothing has changed. `code` is one of the protocol's closed set."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Lost(Failure):
    """There is no connection to the agent, or it ended before the answer came."""

    def __init__(self, detail: str = "no connection to the capture agent") -> None:
        super().__init__("engine_lost", detail)


def encode(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE:
        raise WireError(f"a message of {len(body)} bytes cannot be sent, the limit is {MAX_MESSAGE}")
    return _LENGTH.pack(len(body)) + body


def send(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message, with file descriptors at its first byte.

    Not safe to call from two threads at once.
    """
    if len(descriptors) > MAX_DESCRIPTORS:
        raise WireError(f"{len(descriptors)} descriptors cannot be sent, the limit is {MAX_DESCRIPTORS}")
    data = memoryview(encode(message))
    if descriptors:
        sent = socket.send_fds(sock, [data], list(descriptors))
        data = data[sent:]
    sock.sendall(data)


def receive(sock: Source) -> dict[str, Any] | None:
    """The next message; `None` when the other side has closed between two messages."""
    head = _exactly(sock, _LENGTH.size, may_end=True)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE:
        raise WireError(f"a message of {length} bytes, the limit is {MAX_MESSAGE}")
    body = _exactly(sock, length)
    try:
        message = json.loads(body or b"")
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message is an object, found {type(message).__name__}")
    return message


def _exactly(sock: Source, length: int, *, may_end: bool = False) -> bytearray | None:
    # Grows with what has come, not with what was announced.
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(min(length - len(data), _STEP))
        if not piece:
            if may_end and not data:
                return None
            raise WireError("the connection ended within a message")
        data += piece
    return data
