"""Stands between an engine and its agent, leaves groups out of what the engine says, or refuses to fill.

So a snapshot is made in which a hybrid model's recurrent state is missing, as by a connector that does not know of it; and an engine
learns after it has allocated blocks that they will not be filled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from pf_connector.wire import MATCH_KEYS, parse, receive, receive_body, send


class Proxy:
    """Listens at `path`, speaks with the agent at `agent`."""

    def __init__(self, path: Path, agent: Path) -> None:
        self.omit = ""
        """Groups whose names begin so are left out; empty for none."""
        self.refuse_fill = False
        self._agent = str(agent)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections: members connect and register again."""
        with self._lock:
            sockets, self._open = self._open, []
        for sock in sockets:
            _shut(sock)

    def close(self) -> None:
        """Ends everything."""
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._session, args=(engine,), daemon=True).start()

    def _session(self, engine: socket.socket) -> None:
        with engine, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            try:
                agent.connect(self._agent)
                with self._lock:
                    self._open += [engine, agent]
                self._register(engine, agent)
                # The engine hears both the agent and the proxy's own refusals.
                speaking = threading.Lock()
                back = threading.Thread(target=self._pump, args=(agent, engine, speaking, False), daemon=True)
                back.start()
                self._pump(engine, agent, speaking, True)
                back.join()
            except OSError:
                pass

    def _register(self, engine: socket.socket, agent: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(engine, 4, 64)
        try:
            (length,) = struct.unpack("<I", head)
            first = receive(_Replay(engine, struct.pack("<I", length)))
            if self.omit:
                groups = first["args"].get("groups", [])
                first["args"]["groups"] = [g for g in groups if not g["name"].startswith(self.omit)]
            send(agent, first, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _pump(self, source: socket.socket, target: socket.socket, speaking: threading.Lock, from_engine: bool) -> None:
        try:
            while (body := receive_body(source)) is not None:
                if body[:1] == bytes([MATCH_KEYS]):
                    target.sendall(struct.pack("<I", len(body)) + body)
                    continue
                message = parse(body)
                if not from_engine:
                    with speaking:
                        send(target, message)
                elif self.refuse_fill and message.get("call") == "fill":
                    error = {"code": "live_mismatch", "detail": "refused by the check"}
                    with speaking:
                        send(source, {"id": message["id"], "error": error})
                else:
                    if self.omit:
                        self._strip(message)
                    send(target, message)
        except OSError:
            pass
        finally:
            _shut(source)
            _shut(target)

    def _strip(self, message: dict[str, Any]) -> None:
        for sequence in (message.get("ok") or {}).get("sequences", []):
            sequence["blocks"] = {name: row for name, row in sequence["blocks"].items() if not name.startswith(self.omit)}


class _Replay:
    """A socket of which some bytes were read already."""

    def __init__(self, sock: socket.socket, read: bytes) -> None:
        self._sock = sock
        self._read = read

    def recv(self, size: int) -> bytes:
        """As a socket's."""
        if self._read:
            piece, self._read = self._read[:size], self._read[size:]
            return piece
        return self._sock.recv(size)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
