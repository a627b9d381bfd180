"""Fills under way, each with a time limit.

A fill that is late must not keep its request waiting, and the agent may still write: it has the memory mapped, and a stopped process
goes on where it was. So the blocks are taken out of circulation before vLLM may give them to another request, the agent is told to give
the fill up, and the blocks come back when it has answered that nothing writes there any more. If its process has ended, its mapping has
too; the answer then comes from the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pf_connector.member import Member

log = logging.getLogger("pf_connector")

_AGAIN = 1.0
"""Seconds between two tries to reach the agent."""


@dataclass
class Load:
    """Blocks that every worker has filled for a request."""

    request: str
    restore: str | None
    """The match; none if the blocks cannot be filled and the request must be computed."""
    blocks: dict[str, list[int]] = field(default_factory=dict)
    boundary: int = 0
    """Tokens of the state."""
    kept: int = 0
    """Tokens that the engine had: blocks with these alone are compared and not written."""
    fill: str | None = None
    """The name of this fill."""


@dataclass
class _Filling:
    load: Load
    deadline: float
    written: list[Any]
    late: bool = False


@dataclass
class _Fence:
    """A fill that the agent is told to give up."""

    load: Load
    blocks: list[Any] | None
    """vLLM's blocks that are kept out of circulation; none if this vLLM has no way to do that."""
    answer: Future[dict[str, Any]]
    again: float


class Fillings:
    """The fills of an engine. All on the scheduler's thread."""

    def __init__(self, member: Member, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._limit = limit
        self._clock = clock
        self._open: dict[str, _Filling] = {}
        self._fences: list[_Fence] = []

    @property
    def quarantined(self) -> int:
        """Number of blocks out of circulation."""
        return sum(len(fence.blocks or ()) for fence in self._fences)

    def add(self, load: Load, written: list[Any]) -> None:
        """A fill begins; `written` are vLLM's blocks that the agent writes."""
        self._open[load.request] = _Filling(load, self._clock() + self._limit, written)

    def done(self, request: str) -> tuple[Load, bool] | None:
        """The workers are done with a request: its load, and whether it was late."""
        filling = self._open.pop(request, None)
        return None if filling is None else (filling.load, filling.late)

    def step(self, manager: Any) -> list[str]:
        """Once a step: requests that the workers must give up now."""
        if not self._open and not self._fences:
            return []
        now = self._clock()
        expired = []
        for name, filling in self._open.items():
            if not filling.late and now >= filling.deadline:
                filling.late = True
                blocks = _hold(manager, filling.written)
                self._fences.append(_Fence(filling.load, blocks, self._give_up(filling.load), now + _AGAIN))
                if blocks is None:
                    log.warning("request %s: its blocks cannot be kept out of circulation, it waits for the agent", name)
                else:
                    expired.append(name)
        return expired + self._settle(manager, now)

    def _settle(self, manager: Any, now: float) -> list[str]:
        expired, still = [], []
        for fence in self._fences:
            if not fence.answer.done():
                still.append(fence)
            elif fence.answer.exception() is not None:
                if now >= fence.again and self._member.registered:
                    fence.answer, fence.again = self._give_up(fence.load), now + _AGAIN
                still.append(fence)
            elif fence.blocks is None:
                expired.append(fence.load.request)
            else:
                manager.block_pool.free_blocks(fence.blocks)
        self._fences = still
        return expired

    def _give_up(self, load: Load) -> Future[dict[str, Any]]:
        return self._member.submit("abandon", {"restore": load.restore, "fill": load.fill})


def _hold(manager: Any, blocks: list[Any]) -> list[Any] | None:
    """Counts one more user of these blocks, so that none is given to another request."""
    pool = getattr(manager, "block_pool", None)
    if pool is None or not all(hasattr(pool, name) for name in ("touch", "free_blocks")):
        return None
    pool.touch(blocks)
    return blocks
