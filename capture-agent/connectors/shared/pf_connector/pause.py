"""A pause of an engine: it ends when the agent says so, when the agent goes away, and in any case
when it has lasted too long.

An agent that hangs keeps its connection open and says nothing. So each pause has a name and a
limit. When the agent wakes up and ends the pause, the answer says whether it had held: only then
may the agent use what it read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pf_connector.wire import Failure

log = logging.getLogger("pf_connector")

_AGAIN = 1.0
"""Seconds between two tries to let an engine go on."""


class Steps:
    """The steps of a loop, and pauses between them. `limit` bounds, in seconds, how long a call of
    the agent waits for a step."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._still = threading.Lock()
        self._paused = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the loop. Waits while a pause lasts."""
        with self._still:
            yield

    @contextmanager
    def between(self) -> Iterator[None]:
        """Within, no step runs. Raises `Failure`."""
        self._wait()
        try:
            yield
        finally:
            self._still.release()

    def pause(self) -> None:
        """Begins no step from now on. Raises `Failure` if a step takes too long; nothing has
        changed then."""
        if not self._paused:
            self._wait()
            self._paused = True

    def resume(self) -> None:
        """Steps go on. Without a pause it does nothing: the lock may be that of a step."""
        if self._paused:
            self._paused = False
            self._still.release()

    def _wait(self) -> None:
        if not self._still.acquire(timeout=self._limit):
            raise Failure("timeout", f"a step has taken more than {self._limit:.0f} s: the engine cannot be paused")


class Pause:
    """Serves the calls `pause` and `resume`, and `on_lost` of a member. `limit` is in seconds; the
    agent's own limit holds too."""

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object], limit: float | None = None) -> None:
        self._pause_engine = pause
        self._resume_engine = resume
        self._limit = limit
        self._lock = threading.Lock()
        self._name: str | None = None
        self._held: str | None = None
        self._void: str | None = None
        """A pause that this side tried to end: from then on the engine may have run."""
        self._unsure = False
        """Whether the engine was told to go on, and the answer did not come."""
        self._watch: threading.Timer | None = None

    @property
    def on(self) -> bool:
        """Whether the engine is paused, or could not yet be told to go on."""
        return self._name is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the pause does not end by itself. Raises `Failure` if there is none."""
        with self._lock:
            if self._name is None:
                raise Failure("engine_busy", "the engine is not paused")
            yield

    def begin(self, args: dict[str, Any]) -> dict[str, Any]:
        """Pauses the engine. Raises what pausing raises; the engine goes on then."""
        name = str(args.get("pause", ""))
        with self._lock:
            paused = self._name is not None
            # From here on a resume is owed, even if pausing fails half-way.
            self._name = name
            self._void = None
            self._set_watch(name, self._bound(args))
            try:
                if not paused or self._unsure:
                    self._pause_engine()
                    self._unsure = False
            except Exception:
                self._try_end(name)
                raise
        return {}

    def end(self, args: dict[str, Any]) -> dict[str, Any]:
        """Lets the engine go on if it is paused under this name. Answers whether that pause held
        until a call like this."""
        name = str(args.get("pause", ""))
        with self._lock:
            if self._name == name:
                void = self._void == name
                self._end(name)
                self._held = None if void else name
            return {"held": self._held == name}

    def lost(self) -> None:
        """The agent went away."""
        name = self._name
        if name is not None:
            log.warning("the capture agent went away: the engine goes on")
            self._insist(name)

    def _bound(self, args: dict[str, Any]) -> float | None:
        bounds = [self._limit] if self._limit else []
        if limit := int(args.get("limit_ms") or 0):
            bounds.append(limit / 1000)
        return min(bounds, default=None)

    def _set_watch(self, name: str, seconds: float | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = None
        if seconds is not None:
            self._watch = threading.Timer(seconds, self._expire, (name, seconds))
            self._watch.daemon = True
            self._watch.start()

    def _expire(self, name: str, seconds: float) -> None:
        if self._name == name:
            log.warning("the capture agent has kept the engine paused for %.1f s: the engine goes on, and the capture is void", seconds)
            self._insist(name)

    def _end(self, name: str) -> None:
        """Ends the pause of this name; under the lock. Raises if the engine cannot be told, and the
        pause is as before."""
        self._unsure = True
        self._resume_engine()
        if self._watch is not None:
            self._watch.cancel()
        self._name, self._watch, self._unsure = None, None, False

    def _insist(self, name: str) -> None:
        """Ends the pause of this name without the agent, and tries again if that fails."""
        with self._lock:
            if self._name == name:
                self._try_end(name)

    def _try_end(self, name: str) -> None:
        """Ends the pause of this name, later if that fails now; under the lock."""
        self._void = name
        try:
            self._end(name)
        except Exception as error:
            log.error("the engine cannot be told to go on, trying again: %s", error)
            self._watch = threading.Timer(_AGAIN, self._insist, (name,))
            self._watch.daemon = True
            self._watch.start()
