"""A worker's half: hands over its memory, and asks the agent to fill blocks."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from pf_connector.member import Member
from pf_connector.memory import CannotShare
from pf_connector.wire import Lost

from .deployment import Identity
from .filling import Load
from .layout import Pages, Unsupported
from .shares import PARALLEL

log = logging.getLogger("pf_connector")


class Worker:
    """State of a worker's half."""

    def __init__(self, identity: Identity, rank: int) -> None:
        self._identity = identity
        self._rank = rank
        self._member: Member | None = None
        self._pages: Pages | None = None
        self._fills: dict[str, tuple[Future[dict[str, Any]], Any]] = {}
        self._late: dict[str, tuple[Future[dict[str, Any]], Any]] = {}
        """Given up and not reported yet."""
        self._events: list[tuple[Future[dict[str, Any]], Any]] = []
        """Events of fills that were given up: the agent may still wait for them."""

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
            "verbs": [],
            "rank": self._rank,
            "world": self._identity.world,
            "deployment": self._identity.deployment,
            "parallel": [key for key in PARALLEL if key in self._identity.deployment],
            "memories": self._pages.memories,
            "groups": self._pages.groups,
        }
        who = self._identity
        self._member = Member(who.socket, registration, descriptors=self._pages.descriptors, prepare=who.prepare).start()

    def load(self, loads: list[Load]) -> None:
        """Begins to fill blocks while the engine runs."""
        for load in loads:
            event = _event()
            if load.restore is None or self._member is None:
                future: Future[dict[str, Any]] = Future()
                future.set_exception(Lost("these blocks cannot be filled"))
            else:
                args: dict[str, Any] = {"restore": load.restore, "blocks": load.blocks, "kept": load.kept, "fill": load.fill}
                if event is not None:
                    args["after"] = bytes(event.ipc_handle()).hex()
                future = self._member.submit("fill", args)
            self._fills[load.request] = (future, event)

    def give_up(self, requests: list[str]) -> None:
        """Reports these fills as failed without waiting for the agent. The scheduler keeps their blocks out of circulation."""
        for name in requests:
            fill = self._fills.get(name)
            if fill is not None and not fill[0].done():
                log.warning("request %s: the capture agent has not filled its blocks in time", name)
                self._late[name] = self._fills.pop(name)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        done, failed = set(self._late), set(self._late)
        self._events += self._late.values()
        self._events = [pair for pair in self._events if not pair[0].done()]
        self._late = {}
        for name, (future, _) in list(self._fills.items()):
            if not future.done():
                continue
            del self._fills[name]
            done.add(name)
            if (error := future.exception()) is not None:
                log.warning("request %s could not be restored: %s", name, error)
                failed.add(name)
        return done, failed

    def close(self) -> None:
        """Leaves the engine."""
        if self._member is not None:
            self._member.close()


def _event() -> Any:
    """An event after all work that the engine has launched, after which blocks may be filled.

    Returns `None` without CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event
