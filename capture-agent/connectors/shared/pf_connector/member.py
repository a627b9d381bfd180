"""A member of an engine: one connection to the capture agent, kept by a thread.

The thread registers, reconnects with growing pauses, and hands answers to the callers that wait. A
second one answers the agent's calls one after another, a third one writes: no caller waits for an
agent that does not read. When the connection ends, `on_lost` runs after the calls that had come: an
engine that was paused goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .outbox import MAX_ANSWERS, MAX_WAITING, Outbox
from .wire import PROTOCOL, Failure, Full, Lost, WireError, encode_parts, receive, send

log = logging.getLogger("pf_connector")

Later = Future[Callable[[], dict[str, Any]]]
"""An answer that comes later: a function that makes it, which runs in the thread that answers
calls."""
Verb = Callable[[dict[str, Any]], dict[str, Any] | Later]
"""Answers one of the agent's calls. Raises `Failure` to refuse it."""

MAX_OPEN = 24
"""Calls that are sent and not answered. The agent refuses more than 32 of one member; further calls
wait here."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class Member:
    """One member of one engine.

    `registration` is the protocol's `Register` without `protocol`; `calls` maps the agent's calls
    to functions; `descriptors` go with the registration and stay the caller's.

    `prepare` runs before each registration, in the member's own thread, and adds to it. It may take
    long, and raises `Failure` while the engine cannot be registered.
    """

    def __init__(
        self,
        path: str,
        registration: dict[str, Any],
        calls: Mapping[str, Verb] | None = None,
        *,
        descriptors: Sequence[int] = (),
        prepare: Callable[[], dict[str, Any]] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._prepare = prepare
        self._registration = {"protocol": PROTOCOL, **registration}
        self._calls = dict(calls or {})
        self._descriptors = [os.dup(fd) for fd in descriptors]
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._open: dict[int, Future[dict[str, Any]]] = {}
        self._next = 1
        self._sent = 0
        """Number of calls that the agent works on."""
        self._held: deque[tuple[int, list[bytes]]] = deque()
        """Calls that wait for its answers."""
        self._held_bytes = 0
        self.fingerprint = b""
        """The digest of the engine configuration, as the agent computed it."""
        self.dropped = 0
        """Number of calls that were not sent, because too much waited."""
        self._registered = threading.Event()
        self._closed = threading.Event()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        name = f"pf-{registration['member']}"
        self._threads = [
            threading.Thread(target=self._connect_forever, name=name, daemon=True),
            threading.Thread(target=self._answer_forever, name=f"{name}-calls", daemon=True),
        ]

    def start(self) -> Member:
        """Begins to connect; returns at once."""
        for thread in self._threads:
            thread.start()
        return self

    @property
    def registered(self) -> bool:
        """Whether the agent has accepted the registration."""
        return self._registered.is_set()

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Waits until the agent has accepted the registration."""
        return self._registered.wait(timeout)

    def submit(self, call: str, args: dict[str, Any]) -> Future[dict[str, Any]]:
        """Makes a call and never waits. The future's exception is a `Failure`; `Lost` if there is
        no connection, `Full` if too much waits to be sent."""
        return self.submit_encoded(lambda number: encode_parts({"id": number, "call": call, "args": args}))

    def submit_encoded(self, message: Callable[[int], list[bytes]]) -> Future[dict[str, Any]]:
        """The same with a function that makes the message of the call's number, in pieces."""
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            outbox = self._outbox if self._registered.is_set() else None
            if outbox is not None:
                number = self._next
                self._next += 1
                self._open[number] = future
        if outbox is None:
            future.set_exception(Lost())
            return future
        try:
            data = message(number)
        except WireError as error:
            self._refuse(number, Lost(str(error)))
            return future
        size = sum(map(len, data))
        with self._lock:
            full = bool(self._held) and self._held_bytes + size > MAX_WAITING
            if self._outbox is outbox and not full:
                self._held.append((number, data))
                self._held_bytes += size
        if full:
            self._refuse(number, Full())
        self._send_held()
        return future

    def call(self, call: str, args: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Makes a call and waits for its answer. Raises `Failure`, `TimeoutError`."""
        return self.submit(call, args).result(timeout)

    def reconnect(self) -> None:
        """Ends the connection: the member prepares and registers anew."""
        with self._lock:
            sock = self._socket
        if sock is not None:
            _shut(sock)

    def close(self) -> None:
        """Leaves the engine. The agent drops its mappings."""
        self._closed.set()
        with self._lock:
            sock = self._socket
        if sock is not None:
            _shut(sock)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []

    def _connect_forever(self) -> None:
        pause, said = _FIRST_PAUSE, ""
        while not self._closed.is_set():
            try:
                pause, said = self._session(), ""
            except (OSError, WireError, Failure) as error:
                if (reason := str(error)) != said:
                    log.warning("capture agent at %s: %s; trying again", self._path, reason)
                    said = reason
                pause = min(pause * 2, _LONGEST_PAUSE)
            self._closed.wait(pause)
        self._work.put(None)

    def _session(self) -> float:
        """One connection, from registering to its end; the pause before the next one."""
        registration = self._registration | (self._prepare() if self._prepare is not None else {})
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._path)
            with self._lock:
                self._socket = sock
            try:
                if self._closed.is_set():
                    return 0.0
                send(sock, {"id": 0, "call": "register", "args": registration}, self._descriptors)
                answer = receive(sock)
                if answer is None:
                    raise WireError("the connection ended before the registration was answered")
                if "error" in answer:
                    raise _failure(answer["error"])
                self._take_in(sock, answer.get("ok") or {})
                log.info("registered %s with the capture agent", self._registration["member"])
                self._read(sock)
            finally:
                self._forget(sock)
        return _FIRST_PAUSE

    def _take_in(self, sock: socket.socket, answer: dict[str, Any]) -> None:
        try:
            fingerprint = bytes.fromhex(str(answer.get("fingerprint", "")).removeprefix("sha256:"))
        except ValueError as error:
            raise WireError(f"a fingerprint that is no digest: {error}") from error
        outbox = Outbox(sock, self._threads[0].name)
        with self._lock:
            self.fingerprint, self._outbox = fingerprint, outbox
            self._registered.set()

    def _read(self, sock: socket.socket) -> None:
        while True:
            try:
                message = receive(sock)
            except OSError as error:
                if self._closed.is_set():
                    return
                raise WireError(str(error)) from error
            if message is None:
                return
            if "call" in message:
                self._work.put(functools.partial(self._answer, sock, message))
            else:
                self._take(message)

    def _send_held(self) -> None:
        """Sends what may be sent now."""
        while True:
            with self._lock:
                outbox = self._outbox
                if outbox is None or not self._held or self._sent >= MAX_OPEN:
                    return
                number, data = self._held.popleft()
                self._held_bytes -= sum(map(len, data))
                self._sent += 1
                # Under the lock: calls are sent in their order.
                taken = outbox.put(data)
                self._sent -= not taken
            if not taken:
                self._refuse(number, Full())

    def _refuse(self, number: int, refusal: Failure) -> None:
        """A call is not made."""
        with self._lock:
            future = self._open.pop(number, None)
            self.dropped += isinstance(refusal, Full)
        if future is not None:
            future.set_exception(refusal)

    def _take(self, message: dict[str, Any]) -> None:
        with self._lock:
            future = self._open.pop(message.get("id"), None)  # type: ignore[arg-type]
            self._sent -= 1
        if future is None:
            raise WireError(f"an answer to no open call: {message.get('id')!r}")
        self._send_held()
        if "error" in message:
            future.set_exception(_failure(message["error"]))
        else:
            future.set_result(message.get("ok") or {})

    def _forget(self, sock: socket.socket) -> None:
        was = self._registered.is_set()
        with self._lock:
            self._registered.clear()
            self._socket = None
            outbox, self._outbox = self._outbox, None
            lost, self._open = self._open, {}
            self._sent, self._held_bytes = 0, 0
            self._held.clear()
        if outbox is not None:
            outbox.close()
        _shut(sock)
        for future in lost.values():
            future.set_exception(Lost("the connection to the capture agent ended"))
        if was and self._on_lost is not None:
            self._work.put(self._on_lost)

    def _answer_forever(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("answering the capture agent")

    def _answer(self, sock: socket.socket, message: dict[str, Any]) -> None:
        name = message.get("call")

        def work() -> dict[str, Any] | Later:
            verb = self._calls.get(name)  # type: ignore[arg-type]
            if verb is None:
                raise Failure("invalid_request", f"this member does not serve {name!r}")
            return verb(message.get("args") or {})

        self._reply(sock, message.get("id"), name, work)

    def _reply(self, sock: socket.socket, number: Any, name: Any, work: Callable[[], dict[str, Any] | Later]) -> None:
        try:
            made = work()
            if isinstance(made, Future):
                made.add_done_callback(lambda done: self._work.put(lambda: self._reply(sock, number, name, lambda: done.result()())))
                return
            answer: dict[str, Any] = {"id": number, "ok": made}
        except Failure as failure:
            answer = {"id": number, "error": {"code": failure.code, "detail": failure.detail}}
        except Exception as error:
            log.exception("the agent's call %r", name)
            answer = {"id": number, "error": {"code": "internal", "detail": f"{type(error).__name__}: {error}"}}
        try:
            data = encode_parts(answer)
        except (ValueError, WireError) as error:
            log.exception("the answer to the agent's call %r", name)
            data = encode_parts({"id": number, "error": {"code": "internal", "detail": str(error)}})
        with self._lock:
            outbox = self._outbox if self._socket is sock else None
        if outbox is None:
            log.warning("an answer to the capture agent was lost: the connection has ended")
        elif not outbox.put(data, MAX_ANSWERS):
            # It would wait for this answer for ever. A new connection begins anew.
            log.warning("the capture agent does not read: the connection is ended")
            _shut(sock)


def _failure(error: Any) -> Failure:
    if not isinstance(error, dict):
        return Failure("internal", f"an error without code: {error!r}")
    return Failure(str(error.get("code", "internal")), str(error.get("detail", "")))


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
