"""What becomes of requests while a state lies ready: counted, said in the log, and told to the
agent."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pf_connector.member import Member

log = logging.getLogger("pf_connector")

TAKEN = "taken"
TAKEN_ON_KEPT = "taken-on-kept"
KEPT_DIFFERS = "kept-differs"
ENGINE_HAS_MORE = "engine-has-more"
AGENT_SILENT = "agent-silent"
AGENT_BUSY = "agent-busy"
WAITED_TOO_LONG = "waited-too-long"
OTHER_LENGTH = "other-length"
FILL_FAILED = "fill-failed"
FILL_LATE = "fill-late"
GONE = "gone"
LOGITS_EQUAL = "logits-equal"
LOGITS_DIFFER = "logits-differ"
SAVE_RATE = "save-dropped-rate"
SAVE_BEHIND = "save-dropped-behind"
SAVE_BUDGET = "save-dropped-budget"
SAVE_NAME = "save-dropped-name"
SAVE_REFUSED = "save-dropped-refused"
HIT_ENGINE = "hit-engine"
HIT_MEMORY = "hit-memory"
HIT_STORE = "hit-store"
HIT_REGISTRY = "hit-registry"
MISS = "miss"
HITS = {"memory": HIT_MEMORY, "store": HIT_STORE, "registry": HIT_REGISTRY}
"""By the tier in which the agent had the state."""

_SAID_BY_BREAKER = {AGENT_SILENT, AGENT_BUSY}
"""These come for each request while the agent hangs. The log says once that it hangs."""
_MANY = _SAID_BY_BREAKER | {
    SAVE_RATE,
    SAVE_BEHIND,
    SAVE_BUDGET,
    SAVE_NAME,
    SAVE_REFUSED,
    HIT_ENGINE,
    HIT_MEMORY,
    HIT_STORE,
    HIT_REGISTRY,
    MISS,
}
"""These come for each request of an engine in automatic mode."""
_FINE = {TAKEN, TAKEN_ON_KEPT, KEPT_DIFFERS, ENGINE_HAS_MORE, GONE, LOGITS_EQUAL}
_EVERY = 0.2
"""Seconds between two reports."""


class Tally:
    """The counts. From any thread: an engine that does nothing has no steps, and tells what it
    counted last all the same."""

    def __init__(self, member: Member, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._clock = clock
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Since the engine began."""
        self._untold: Counter[tuple[str | None, str]] = Counter()
        self._sent: Counter[tuple[str | None, str]] = Counter()
        self._report: Future[dict[str, Any]] | None = None
        self._next = 0.0

    def add(self, what: str, request: str, restore: str | None = None) -> None:
        """Something became of a request."""
        with self._lock:
            self.counts[what] += 1
            self._untold[restore, what] += 1
        level = logging.DEBUG if what in _MANY else logging.INFO if what in _FINE else logging.WARNING
        log.log(level, "request %s, state %s: %s", request, restore or "-", what)

    def tell(self) -> None:
        """Once a step, and once a second: reports what is new, and again what did not arrive."""
        with self._lock:
            if self._report is not None:
                if not self._report.done():
                    return
                if self._report.exception() is not None:
                    self._untold.update(self._sent)
                self._report = None
            now = self._clock()
            if not self._untold or now < self._next or not self._member.registered:
                return
            self._next = now + _EVERY
            self._sent, self._untold = self._untold, Counter()
            outcomes = []
            for (restore, what), count in self._sent.items():
                outcome: dict[str, Any] = {"what": what, "count": count}
                outcomes.append(outcome if restore is None else outcome | {"restore": restore})
            self._report = self._member.submit("report", {"outcomes": outcomes})
