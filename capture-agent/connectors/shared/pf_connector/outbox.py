"""Messages on their way to the agent: taken at once, written by a thread.

An agent that hangs does not read. The kernel buffers a few hundred KiB; after that a write blocks,
and no thread of the engine may.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Sequence

MAX_WAITING = 4 << 20
"""Bytes of calls that may wait. A full outbox takes no more: then there is no agent, as far as a
request is concerned."""
MAX_ANSWERS = 128 << 20
"""Bytes that may wait when an answer is added. A table of 380,000 tokens is about 3 MB."""


class Outbox:
    """The outgoing side of one connection."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._ready = threading.Condition()
        self._messages: deque[tuple[Sequence[bytes], int]] = deque()
        self._waiting = 0
        self._open = True
        threading.Thread(target=self._write, name=f"{name}-send", daemon=True).start()

    def put(self, message: Sequence[bytes], limit: int = MAX_WAITING) -> bool:
        """Takes a message, in pieces, and never waits; `False` if `limit` bytes wait already, or
        the connection has ended."""
        size = sum(map(len, message))
        with self._ready:
            # An empty outbox takes anything, so that no single message is too long for it.
            if not self._open or (self._messages and self._waiting + size > limit):
                return False
            self._messages.append((message, size))
            self._waiting += size
            self._ready.notify()
        return True

    def close(self) -> None:
        """Drops what waits. The thread ends; the socket must be shut down by its owner, a write may
        be under way."""
        with self._ready:
            self._open = False
            self._messages.clear()
            self._ready.notify()

    def _write(self) -> None:
        while True:
            with self._ready:
                while self._open and not self._messages:
                    self._ready.wait()
                if not self._open:
                    return
                message, size = self._messages[0]
            try:
                for piece in message:
                    self._sock.sendall(piece)
            except OSError:
                # The reading side sees the end of the connection too.
                self.close()
                return
            with self._ready:
                if self._messages:
                    self._messages.popleft()
                    self._waiting -= size
