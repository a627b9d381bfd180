"""Fills under way, each with a time limit.

A fill that is late must not keep its request waiting, and the agent may still write. So its blocks
are taken out of circulation before vLLM may give them to another request, and come back when
nothing writes there any more (`pf_connector.fence`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pf_connector.fence import Fences
from pf_connector.member import Member

log = logging.getLogger("pf_connector")


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


class Fillings:
    """The fills of an engine. All on the scheduler's thread."""

    def __init__(self, member: Member, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._open: dict[str, _Filling] = {}
        self._fences = Fences(member, clock)
        self._expired: list[str] = []

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
        for name, filling in self._open.items():
            if not filling.late and now >= filling.deadline:
                filling.late = True
                self._give_up(name, filling, manager)
        self._fences.step()
        expired = self._expired.copy()
        self._expired.clear()
        return expired

    def _give_up(self, name: str, filling: _Filling, manager: Any) -> None:
        load, blocks = filling.load, _hold(manager, filling.written)
        if blocks is None:
            log.warning("request %s: its blocks cannot be kept out of circulation, it waits for the agent", name)
            self._fences.add(load.restore, load.fill, functools.partial(self._expired.append, name))
        else:
            self._fences.add(load.restore, load.fill, functools.partial(manager.block_pool.free_blocks, blocks))
            self._expired.append(name)


def _hold(manager: Any, blocks: list[Any]) -> list[Any] | None:
    """Counts one more user of these blocks, so that none is given to another request."""
    pool = getattr(manager, "block_pool", None)
    if pool is None or not all(hasattr(pool, name) for name in ("touch", "free_blocks")):
        return None
    pool.touch(blocks)
    return blocks
