"""A worker's half: hands over its memory, copies blocks for captures, and asks the agent to fill
blocks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pf_connector.layout import Unsupported
from pf_connector.member import Member
from pf_connector.memory import CannotShare, event
from pf_connector.wire import Failure, Lost

from .deployment import Identity
from .filling import Load
from .first_step import FirstSteps
from .holding import Copy
from .layout import Pages
from .shares import PARALLEL

log = logging.getLogger("pf_connector")

_DRAIN = 1.0
"""Seconds after the end of a connection in which a GPU may still do a copy that a killed agent had
begun (decision 34)."""


@dataclass
class _Fill:
    answer: Future[dict[str, Any]]
    event: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    lost: float | None = None
    """When it was seen that the connection had ended."""


class Worker:
    """State of a worker's half."""

    def __init__(self, identity: Identity, rank: int, first_steps: FirstSteps | None = None) -> None:
        self._identity = identity
        self._first_steps = first_steps
        self._rank = rank
        self._member: Member | None = None
        self._pages: Pages | None = None
        self._fills: dict[str, _Fill] = {}
        self._late: dict[str, _Fill] = {}
        """Given up and not reported yet."""
        self._events: list[_Fill] = []
        """Fills that were given up: the agent may still wait for their events."""
        self._differing: set[str] = set()
        self._copies: list[tuple[str, Any]] = []
        """Copies that were launched, each with an event after it."""

    def register(self, config: Any, caches: dict[str, Any], layers: dict[str, Any]) -> None:
        """Shares the caches.

        An engine that cannot be captured still serves requests; the agent shows what is missing.
        """
        tag = self._identity.deployment["engine"].replace("/", "-")
        try:
            self._pages = Pages(config, caches, layers, tag, self._identity.shares.at(self._rank))
        except (CannotShare, Unsupported) as error:
            log.error("this engine cannot be captured: %s", error)
            return
        registration = {
            "engine": self._identity.engine,
            "member": f"worker-{self._rank}",
            "verbs": ["oracle"] if self._first_steps is not None else [],
            "rank": self._rank,
            "world": self._identity.world,
            "deployment": self._identity.deployment,
            "parallel": [key for key in PARALLEL if key in self._identity.deployment],
            "memories": self._pages.memories,
            "groups": self._pages.groups,
        }
        who = self._identity
        calls = {"oracle": self._first_steps.oracle} if self._first_steps is not None else {}
        self._member = Member(who.socket, registration, calls, descriptors=self._pages.descriptors, prepare=who.prepare).start()

    def copy(self, copies: list[Copy]) -> None:
        """Copies blocks on the current stream, after everything that the engine has launched."""
        for copy in copies:
            if self._first_steps is not None and copy.request is not None:
                self._first_steps.watch(copy.request, copy.boundary)
            for group, source, target in copy.pairs:
                if self._pages is not None:
                    self._pages.copy(group, source, target)
            self._copies.append((copy.key, event(interprocess=False)))

    def copied(self) -> Counter[str]:
        """Copies that have ended since the last call."""
        ended = [key for key, event in self._copies if event is None or event.query()]
        if ended:
            self._copies = [pair for pair in self._copies if pair[0] not in ended]
        return Counter(ended)

    def load(self, loads: list[Load]) -> None:
        """Begins to fill blocks while the engine runs."""
        for load in loads:
            after = event()
            if load.restore is None or self._member is None:
                fill = _Fill(Future())
                fill.answer.set_exception(Lost("these blocks cannot be filled"))
            else:
                args: dict[str, Any] = {"restore": load.restore, "blocks": load.blocks, "kept": load.kept, "fill": load.fill}
                if after is not None:
                    args["after"] = bytes(after.ipc_handle()).hex()
                fill = _Fill(self._member.submit("fill", args), after, args)
            self._fills[load.request] = fill

    def give_up(self, requests: list[str]) -> None:
        """Reports these fills as failed without waiting for the agent. The scheduler keeps their
        blocks out of circulation."""
        for name in requests:
            fill = self._fills.get(name)
            if fill is not None and not fill.answer.done():
                log.warning("request %s: the capture agent has not filled its blocks in time", name)
                self._late[name] = self._fills.pop(name)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        done, failed = set(self._late), set(self._late)
        self._events += self._late.values()
        self._events = [fill for fill in self._events if not fill.answer.done()]
        self._late = {}
        now = time.monotonic()
        for name, fill in list(self._fills.items()):
            if not fill.answer.done():
                continue
            error = fill.answer.exception()
            code = error.code if isinstance(error, Failure) else None
            if code == "overloaded" and self._member is not None:
                # Nothing was begun. The scheduler's limit for fills holds.
                fill.answer = self._member.submit("fill", fill.args)
                continue
            if isinstance(error, Lost) and fill.event is not None:
                fill.lost = now if fill.lost is None else fill.lost
                if now - fill.lost < _DRAIN:
                    continue
            del self._fills[name]
            done.add(name)
            if error is not None:
                log.warning("request %s could not be restored: %s", name, error)
                failed.add(name)
            elif self._first_steps is not None and (oracle := fill.answer.result().get("oracle")):
                self._first_steps.expect(name, fill.args["restore"], oracle)
            if code == "kept_differs":
                self._differing.add(name)
        return done, failed

    def compared(self) -> list[tuple[str, str, bool]]:
        """First steps that were compared since the last call: request, state, whether their logits
        are equal."""
        return [] if self._first_steps is None else self._first_steps.compared()

    def differing(self) -> set[str]:
        """Requests whose loads have failed since the last call because blocks that the engine had
        hold other bytes."""
        found, self._differing = self._differing, set()
        return found

    def close(self) -> None:
        """Leaves the engine."""
        if self._member is not None:
            self._member.close()
