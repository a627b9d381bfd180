"""Whether requests wait for the agent. After one that waited in vain none does, until a question
has been answered again."""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger("pf_connector")

_FIRST = 1.0
_LONGEST = 30.0


class Way(Enum):
    """How a request goes."""

    WAIT = "wait"
    """Ask, and wait for the answer."""
    PROBE = "probe"
    """Ask, and do not wait: the answer shows that the agent is back."""
    PASS = "pass"
    """Do not ask."""


class Breaker:
    """The switch. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._probe_at = 0.0

    @property
    def open(self) -> bool:
        """Whether no request waits."""
        return self._pause > 0

    def way(self, now: float) -> Way:
        """How the next request goes."""
        if not self.open:
            return Way.WAIT
        if now < self._probe_at:
            return Way.PASS
        self._later(now)
        return Way.PROBE

    def failed(self, now: float) -> None:
        """A request waited in vain."""
        if not self.open:
            log.warning("the capture agent does not answer: requests go on without it until it does")
            self._later(now)

    def answered(self) -> None:
        """The agent answered."""
        if self.open:
            log.info("the capture agent answers again")
        self._pause = 0.0

    def reset(self) -> None:
        """Another agent will come."""
        self._pause = 0.0

    def _later(self, now: float) -> None:
        self._pause = min(self._pause * 2, _LONGEST) or _FIRST
        self._probe_at = now + self._pause
