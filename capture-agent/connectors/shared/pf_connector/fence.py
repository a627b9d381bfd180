"""Fills that were given up, until the agent says that nothing writes into their blocks any more.

The agent has the memory mapped, and a stopped process goes on where it was: a fill that is late may
write at any later time. So its blocks stay out of circulation until the agent has answered. If its
process has ended, its mapping has too; the answer then comes from the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .member import Member

_AGAIN = 1.0
"""Seconds between two tries to reach the agent."""


@dataclass
class _Fence:
    restore: str | None
    fill: str | None
    over: Callable[[], None]
    answer: Future[dict[str, Any]]
    again: float


class Fences:
    """Fills that the agent is told to give up. All on one thread."""

    def __init__(self, member: Member, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._clock = clock
        self._fences: list[_Fence] = []

    def __len__(self) -> int:
        """Number of fills without an answer."""
        return len(self._fences)

    def add(self, restore: str | None, fill: str | None, over: Callable[[], None]) -> None:
        """Tells the agent to give up the fill of this name. `step` calls `over` when nothing writes
        into its blocks any more."""
        self._fences.append(_Fence(restore, fill, over, self._give_up(restore, fill), self._clock() + _AGAIN))

    def step(self) -> None:
        """Looks for answers, and asks again where none can come. Never waits."""
        fences, self._fences = self._fences, []
        for fence in fences:
            if not fence.answer.done():
                self._fences.append(fence)
            elif fence.answer.exception() is None:
                fence.over()
            else:
                now = self._clock()
                if now >= fence.again and self._member.registered:
                    fence.answer, fence.again = self._give_up(fence.restore, fence.fill), now + _AGAIN
                self._fences.append(fence)

    def _give_up(self, restore: str | None, fill: str | None) -> Future[dict[str, Any]]:
        return self._member.submit("abandon", {"restore": restore, "fill": fill})
