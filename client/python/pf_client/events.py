"""Following what happens in a registry: server-sent events, each once and in order.

A stream that is cut is asked for again, after the last id that was read.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Generator, Iterator, Mapping
from typing import get_args

from .errors import Error
from .model import Event, EventKind, Reset, parse
from .transport import Transport, backoff

_MOST = 1 << 20
"""Bytes of an event at most."""

_HEALTHY = 10.0
"""Seconds: a stream that lived for so long was no failure."""

_LONGEST_WAIT = 30.0
"""Seconds before a stream is asked for again, at most."""

_ID = re.compile("[0-9a-f]{1,32}-[0-9]{1,19}")


class Block:
    """The lines of one event. One without data only says an id."""

    __slots__ = ("data", "event", "id")

    def __init__(self) -> None:
        self.id: str | None = None
        self.event = ""
        self.data: list[str] = []


class Blocks:
    """Takes a stream apart, in pieces as they come."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._looked = 0
        self._block = Block()
        self._bytes = 0

    def push(self, data: bytes) -> Iterator[Block]:
        """Adds bytes, and returns the blocks that they complete. Raises `ValueError` for one of
        more than a MiB."""
        self._held += data
        while (end := self._held.find(b"\n", self._looked)) >= 0:
            line = self._held[:end].decode(errors="replace").removesuffix("\r")
            del self._held[: end + 1]
            self._looked = 0
            if line:
                self._bytes += end
                self._check(self._bytes)
                self._line(line)
            elif self._bytes:
                done, self._block, self._bytes = self._block, Block(), 0
                yield done
        self._looked = len(self._held)
        self._check(self._bytes + len(self._held))

    def _check(self, found: int) -> None:
        if found > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")

    def _line(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and "\0" not in value:
            self._block.id = value
        elif name == "event":
            self._block.event = value
        elif name == "data":
            self._block.data.append(value)


def follow(
    transport: Transport, query: Mapping[str, str | int | None], after: str | None, waits: bool
) -> Generator[Event | Reset, None, None]:
    """The events after an id, or from now on. With `waits` it does not end."""
    last, failures = after, 0
    asked = {**query, "follow": "true" if waits else "false"}
    while True:
        headers = {} if last is None else {"last-event-id": last}
        stream = transport.stream(["events"], query=asked, kind="text/event-stream", headers=headers)
        begun, blocks = time.monotonic(), Blocks()
        try:
            while data := stream.read():
                for block in blocks.push(data):
                    # The id is sent back in a header.
                    if block.id is not None and _ID.fullmatch(block.id):
                        last = block.id
                    found = _read(block)
                    if found is not None:
                        failures = 0
                        yield found
            if not waits:
                return
        except (OSError, http.client.HTTPException):
            # It was cut, or fell silent.
            pass
        except ValueError as error:
            raise Error("unavailable", f"the answer is not that of a registry: {error}") from None
        finally:
            stream.close()
        failures = 1 if time.monotonic() - begun >= _HEALTHY else failures + 1
        time.sleep(min(backoff(failures), _LONGEST_WAIT))


def _read(block: Block) -> Event | Reset | None:
    """What a block says; `None` if it only has an id, or a kind that newer registries know."""
    if block.event != "reset" and block.event not in get_args(EventKind):
        return None
    try:
        found = json.loads("\n".join(block.data))
    except RecursionError:
        raise ValueError("an event is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("an event is not an object")
    return parse(Reset, {**found, "kind": "reset"}) if block.event == "reset" else parse(Event, found)
