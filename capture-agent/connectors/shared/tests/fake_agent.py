"""A fake capture agent for unit tests: it accepts registrations, makes calls, and answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pf_connector.wire import MATCH_KEYS, PACKED, encode, send

FINGERPRINT = "sha256:" + "0" * 64
Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


class FakeAgent:
    """Listens on a socket. Each connection is a `Link`, in the order in which they came."""

    def __init__(self, path: str, answer: Answer | None = None) -> None:
        self.path = path
        self.links: list[Link] = []
        self.came = threading.Condition()
        self.refuse: dict[str, Any] | None = None
        """The error that registrations are answered with."""
        self._answer = answer or (lambda call, args: {})
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(path)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def beside(cls, test: unittest.TestCase, answer: Answer | None = None) -> FakeAgent:
        """An agent in a folder of its own. Both go when the test ends."""
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        agent = cls(str(Path(folder.name) / "s"), answer)
        test.addCleanup(agent.close)
        return agent

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._session, args=(sock,), daemon=True).start()

    def _session(self, sock: socket.socket) -> None:
        link = Link(sock, self._answer, self.refuse)
        with self.came:
            self.links.append(link)
            self.came.notify_all()
        link.run()

    def link(self, number: int, timeout: float = 10) -> Link:
        """The connection with this number, after its registration."""
        with self.came:
            if not self.came.wait_for(lambda: len(self.links) > number, timeout):
                raise TimeoutError(f"connection {number} did not come")
        link = self.links[number]
        if not link.registered.wait(timeout):
            raise TimeoutError(f"connection {number} did not register")
        return link

    def wait_for(self, look: Callable[[list[Link]], Any], timeout: float = 10) -> Any:
        """What `look` finds in the connections, as soon as it finds something."""
        end = time.monotonic() + timeout
        while not (found := look(self.links)):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.01)
        return found

    def close(self) -> None:
        """Ends everything."""
        self._server.close()
        for link in self.links:
            link.close()


class Link:
    """One connection."""

    def __init__(self, sock: socket.socket, answer: Answer, refuse: dict[str, Any] | None) -> None:
        self.register: dict[str, Any] = {}
        self.ended = threading.Event()
        self._refuse = refuse
        self.descriptors: list[int] = []
        self.registered = threading.Event()
        self._sock = sock
        self._answer = answer
        self._answers: dict[int, dict[str, Any]] = {}
        self._came = threading.Condition()
        self._next = 100
        self.reading = threading.Event()
        """Cleared: it reads nothing more and answers nothing, as a stopped process, and its
        connection stays open."""
        self.reading.set()
        self.room: int | None = None
        """Calls that it works on at a time, as the agent does: further ones are refused. `work`
        answers those that wait."""
        self._waiting: list[dict[str, Any]] = []
        self._working = threading.Lock()

    def run(self) -> None:
        """Reads until the connection ends."""
        try:
            head, self.descriptors, _, _ = socket.recv_fds(self._sock, 4, 64)
            (length,) = struct.unpack("<I", head)
            body = b""
            while len(body) < length:
                body += self._sock.recv(length - len(body))
            first = json.loads(body)
            self.register = first["args"]
            if self._refuse is not None:
                send(self._sock, {"id": first["id"], "error": self._refuse})
                return
            send(self._sock, {"id": first["id"], "ok": {"agent": "test", "fingerprint": FINGERPRINT}})
            self.registered.set()
            while (message := self._receive()) is not None:
                self.reading.wait()
                if "call" in message:
                    self._reply(message)
                else:
                    with self._came:
                        self._answers[message["id"]] = message
                        self._came.notify_all()
        except OSError:
            pass
        finally:
            self.ended.set()

    def _receive(self) -> dict[str, Any] | None:
        head = self._exactly(4)
        if head is None:
            return None
        body = self._exactly(struct.unpack("<I", head)[0]) or b""
        if body[0] == MATCH_KEYS:
            return match_keys(body)
        return unpacked(body) if body[0] == PACKED else json.loads(body)

    def _exactly(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            self.reading.wait()
            piece = self._sock.recv(min(length - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def work(self) -> None:
        """Answers the calls that wait."""
        with self._working:
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self._send_answer(message, self._answer(message["call"], message["args"]))

    def _reply(self, message: dict[str, Any]) -> None:
        with self._working:
            if self.room is None:
                self._send_answer(message, self._answer(message["call"], message["args"]))
            elif len(self._waiting) < self.room:
                self._waiting.append(message)
            else:
                self._send_answer(message, {"code": "overloaded", "detail": f"{self.room} calls are open already"})

    def _send_answer(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        key = "error" if "code" in answer else "ok"
        send(self._sock, {"id": message["id"], key: answer})

    def call(self, name: str, args: dict[str, Any] | None = None, timeout: float = 10, dribble: bool = False) -> dict[str, Any]:
        """Calls the engine and waits for the whole answer message. `dribble` sends byte by byte."""
        self._next += 1
        number = self._next
        message = {"id": number, "call": name, "args": args or {}}
        if dribble:
            for byte in encode(message):
                self._sock.sendall(bytes([byte]))
        else:
            send(self._sock, message)
        with self._came:
            if not self._came.wait_for(lambda: number in self._answers, timeout):
                raise TimeoutError(name)
            return self._answers.pop(number)

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []


def unpacked(body: bytes) -> dict[str, Any]:
    """A message with packed tokens of its bytes, as if it had come in JSON."""
    (length,) = struct.unpack_from("<I", body, 1)
    message: dict[str, Any] = json.loads(body[5 : 5 + length])
    place = message["ok"] if "ok" in message else message["args"].get("request", message["args"])
    assert place["tokens"] == [], "tokens come once"
    place["tokens"] = [token for (token,) in struct.iter_unpack("<I", body[5 + length :])]
    return message


def match_keys(body: bytes) -> dict[str, Any]:
    """The call `match-keys` of its bytes, as if it had come in JSON."""
    number, tokens, computed = struct.unpack_from("<QQQ", body, 1)
    at = 25

    def text() -> str:
        nonlocal at
        (length,) = struct.unpack_from("<I", body, at)
        at += 4 + length
        return body[at - length : at].decode()

    args: dict[str, Any] = {"tokens": tokens, "computed": computed, "salt": text()}
    at += 1
    if body[at - 1]:
        args["adapter"] = text()
    (count,) = struct.unpack_from("<I", body, at)
    keys = [struct.unpack_from("<Q32s", body, at + 4 + 40 * i) for i in range(count)]
    assert len(body) == at + 4 + 40 * count, "bytes follow the keys"
    args["keys"] = {length: key.hex() for length, key in keys}
    return {"id": number, "call": "match-keys", "args": args}
