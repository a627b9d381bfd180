"""Messages between an engine and the capture agent.

A message is a `u32` little-endian length, then that many bytes of JSON.

One call, which is made for every request, has a binary form (`schema/src/engine/binary.rs`). The
tokens of a message may follow its JSON as bytes (`schema/src/engine/packed.rs`): JSON of many
tokens is made in one piece, and no other thread of the engine runs meanwhile. File descriptors
travel as `SCM_RIGHTS` with a message's first byte. Only the standard library is used.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from .tokens import Packed

PROTOCOL = 4
"""Version of the protocol."""
MAX_MESSAGE = 64 << 20
"""Maximum bytes of one message."""
MAX_DESCRIPTORS = 64
"""Maximum file descriptors with one message."""

MATCH_KEYS = 1
"""First byte of the binary form of `match-keys`."""
PACKED = 2
"""First byte of a message whose tokens follow its JSON."""
MAX_TEXT = 1 << 20
"""Bytes of a salt or an adapter's name in `match-keys`."""

_LENGTH = struct.Struct("<I")
_NUMBERS = struct.Struct("<BQQQ")
_KEY = struct.Struct("<Q32s")
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


class Full(Lost):
    """The agent does not read what it is sent, and as much waits as may."""

    def __init__(self) -> None:
        super().__init__("the capture agent does not read")


def encode_match_keys(number: int, tokens: int, computed: int, salt: str, adapter: str | None, keys: Sequence[tuple[int, bytes]]) -> bytes:
    """The call `match-keys` as it is sent. `keys` are ascending prefix lengths with their keys of
    32 bytes."""
    words = [_NUMBERS.pack(MATCH_KEYS, number, tokens, computed), _text(salt)]
    words += [b"\0"] if adapter is None else [b"\1", _text(adapter)]
    words.append(_LENGTH.pack(len(keys)))
    words += [_KEY.pack(length, key) for length, key in keys]
    body = b"".join(words)
    return _LENGTH.pack(len(body)) + body


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_TEXT:
        raise WireError(f"a text of {len(data)} bytes cannot be sent, the limit is {MAX_TEXT}")
    return _LENGTH.pack(len(data)) + data


def encode(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return b"".join(encode_parts(message))


def encode_parts(message: dict[str, Any]) -> list[bytes]:
    """The same in pieces. The message may have `Packed` tokens in one place."""
    packed: list[Packed] = []

    def aside(value: object) -> list[int]:
        if not isinstance(value, Packed) or packed:
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        packed.append(value)
        return []

    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=aside).encode()
    parts = [body] if not packed else [bytes([PACKED]) + _LENGTH.pack(len(body)) + body, *packed[0].parts]
    length = sum(map(len, parts))
    if length > MAX_MESSAGE:
        raise WireError(f"a message of {length} bytes cannot be sent, the limit is {MAX_MESSAGE}")
    return [_LENGTH.pack(length) + parts[0], *parts[1:]]


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
    """The next message, in JSON; `None` when the other side has closed between two messages."""
    body = receive_body(sock)
    return None if body is None else parse(body)


def receive_body(sock: Source) -> bytes | None:
    """The bytes of the next message, without their length; `None` as above."""
    head = _exactly(sock, _LENGTH.size, may_end=True)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE:
        raise WireError(f"a message of {length} bytes, the limit is {MAX_MESSAGE}")
    return bytes(_exactly(sock, length) or b"")


def parse(body: bytes) -> dict[str, Any]:
    """A message of its bytes, in JSON."""
    try:
        message = json.loads(body)
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
