"""What becomes of requests while a state lies ready: counted, said in the log, and told to the
agent."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
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
_AUTOMATIC = {
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
_MANY = _SAID_BY_BREAKER | _AUTOMATIC
_FINE = {TAKEN, TAKEN_ON_KEPT, KEPT_DIFFERS, ENGINE_HAS_MORE, GONE, LOGITS_EQUAL}
_EVERY = 0.2
"""Seconds between two reports."""
_NAMED = 16
"""Requests of an outcome that a report names, the last ones."""
_NAME = 256
"""Characters of such a name: clients of the engine may choose it."""

_Key = tuple[str | None, str]
"""A state, and what became of requests for which it lay ready."""


class Tally:
    """The counts. From any thread: an engine that does nothing has no steps, and tells what it
    counted last all the same."""

    def __init__(self, member: Member, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._clock = clock
        # To send a report may refuse a save that waits to be sent: its callback calls `add` then.
        self._lock = threading.RLock()
        self.counts: Counter[str] = Counter()
        """Since the engine began."""
        self._untold: Counter[_Key] = Counter()
        self._sent: Counter[_Key] = Counter()
        self._requests: dict[_Key, deque[dict[str, str]]] = {}
        """Some of those that `_untold` counts."""
        self._sent_requests: dict[_Key, deque[dict[str, str]]] = {}
        self._report: Future[dict[str, Any]] | None = None
        self._next = 0.0

    def add(self, what: str, request: str, restore: str | None = None, fill: str | None = None) -> None:
        """Something became of a request. `fill` is the name of the fill of its blocks, if it came
        to one."""
        with self._lock:
            self.counts[what] += 1
            self._untold[restore, what] += 1
            if what not in _AUTOMATIC:
                named = self._requests.setdefault((restore, what), deque(maxlen=_NAMED))
                one = {"request": request[:_NAME]}
                named.append(one if fill is None else one | {"fill": fill})
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
                    for key, named in self._sent_requests.items():
                        named.extend(self._requests.get(key, ()))
                        self._requests[key] = named
                self._report = None
            now = self._clock()
            if not self._untold or now < self._next or not self._member.registered:
                return
            self._next = now + _EVERY
            self._sent, self._untold = self._untold, Counter()
            self._sent_requests, self._requests = self._requests, {}
            outcomes = []
            for (restore, what), count in self._sent.items():
                outcome: dict[str, Any] = {"what": what, "count": count}
                if restore is not None:
                    outcome["restore"] = restore
                if (restore, what) in self._sent_requests:
                    outcome["requests"] = list(self._sent_requests[restore, what])
                outcomes.append(outcome)
            self._report = self._member.submit("report", {"outcomes": outcomes})
