"""A proxy between an engine and its agent, for three faults.

It can remove groups from the engine's messages: the agent then captures a hybrid model without its
recurrent state, as with a connector that does not know about that state. And it can refuse `fill`:
the engine then has to free blocks that it has already allocated. And it can keep back the answers
to `hold`: the agent then copies blocks that the engine has held for a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from pf_connector.wire import MATCH_KEYS, PACKED, parse, receive, receive_body, send


class Proxy:
    """Listens on the socket `path` and forwards to the agent's socket `agent`."""

    def __init__(self, path: Path, agent: Path) -> None:
        self.omit = ""
        """Removes the groups whose names start with this; empty removes none."""
        self.refuse_fill = False
        self.passes_holds = threading.Event()
        """Answers to `hold` wait while it is clear."""
        self.passes_holds.set()
        self._agent = str(agent)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Closes all connections, so that members connect and register again."""
        with self._lock:
            sockets, self._open = self._open, []
        for sock in sockets:
            _shut(sock)

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._server.close()
        self.passes_holds.set()
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
                session = _Session(engine, agent)
                back = threading.Thread(target=self._pump, args=(session, False), daemon=True)
                back.start()
                self._pump(session, True)
                back.join()
            except OSError:
                pass

    def _register(self, engine: socket.socket, agent: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(engine, 4, 64)
        try:
            (length,) = struct.unpack("<I", head)
            first = receive(_Replay(engine, struct.pack("<I", length)))
            if first is None:
                return
            if self.omit:
                groups = first["args"].get("groups", [])
                first["args"]["groups"] = [g for g in groups if not g["name"].startswith(self.omit)]
            send(agent, first, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _pump(self, session: _Session, from_engine: bool) -> None:
        engine, agent = session.engine, session.agent
        source, target = (engine, agent) if from_engine else (agent, engine)
        try:
            while (body := receive_body(source)) is not None:
                if body[:1] == bytes([MATCH_KEYS]):
                    with session.to_agent:
                        _send_body(agent, body)
                    continue
                message, tokens = _parts(body)
                if not from_engine:
                    if message.get("call") == "hold":
                        session.holds.add(message["id"])
                    with session.to_engine:
                        _forward(engine, message, tokens)
                elif self.refuse_fill and message.get("call") == "fill":
                    error = {"code": "live_mismatch", "detail": "refused by the check"}
                    with session.to_engine:
                        send(engine, {"id": message["id"], "error": error})
                elif "call" not in message and message.get("id") in session.holds and not self.passes_holds.is_set():
                    threading.Thread(target=self._later, args=(session, message, tokens), daemon=True).start()
                else:
                    if self.omit:
                        self._strip(message)
                    with session.to_agent:
                        _forward(agent, message, tokens)
        except OSError:
            pass
        finally:
            _shut(source)
            _shut(target)

    def _later(self, session: _Session, message: dict[str, Any], tokens: bytes | None) -> None:
        """Passes an answer on when answers to `hold` may pass. Other messages go ahead of it."""
        self.passes_holds.wait()
        with contextlib.suppress(OSError), session.to_agent:
            _forward(session.agent, message, tokens)

    def _strip(self, message: dict[str, Any]) -> None:
        answer = message.get("ok") or {}
        # Of `hold` one sequence, of `table` a list of them.
        for sequence in [answer, *answer.get("sequences", [])]:
            if "blocks" in sequence:
                sequence["blocks"] = {name: row for name, row in sequence["blocks"].items() if not name.startswith(self.omit)}


class _Session:
    """The two connections of one member. Several threads write to each."""

    def __init__(self, engine: socket.socket, agent: socket.socket) -> None:
        self.engine, self.agent = engine, agent
        self.to_engine, self.to_agent = threading.Lock(), threading.Lock()
        self.holds: set[int] = set()
        """Numbers of the agent's calls of `hold`."""


class _Replay:
    """A socket that first returns bytes that were already read from it."""

    def __init__(self, sock: socket.socket, read: bytes) -> None:
        self._sock = sock
        self._read = read

    def recv(self, size: int) -> bytes:
        """Like `socket.recv`."""
        if self._read:
            piece, self._read = self._read[:size], self._read[size:]
            return piece
        return self._sock.recv(size)


def _parts(body: bytes) -> tuple[dict[str, Any], bytes | None]:
    """The JSON of a message, and the tokens behind it if it has any there."""
    if body[:1] != bytes([PACKED]):
        return parse(body), None
    (length,) = struct.unpack_from("<I", body, 1)
    return parse(body[5 : 5 + length]), body[5 + length :]


def _forward(target: socket.socket, message: dict[str, Any], tokens: bytes | None) -> None:
    if tokens is None:
        send(target, message)
        return
    text = json.dumps(message).encode()
    _send_body(target, bytes([PACKED]) + struct.pack("<I", len(text)) + text + tokens)


def _send_body(target: socket.socket, body: bytes) -> None:
    target.sendall(struct.pack("<I", len(body)) + body)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
