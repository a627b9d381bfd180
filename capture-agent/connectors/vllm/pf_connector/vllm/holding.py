"""State of sequences that stays as it is until the agent has copied it, while vLLM goes on.

A block is held by counting one more user of it in vLLM's block pool: vLLM gives it to no other
request, whatever becomes of its own, and needs no step to free it. Sealed blocks are held where
they are. The last, partly filled block and the recurrent state are overwritten by the next step:
the workers copy them to other blocks before that step's forward pass, when memory is at rest at
this token position. A request that has ended overwrites nothing any more: its own blocks are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pf_connector import holding
from pf_connector.holding import HoldLimits, State, Wanted
from pf_connector.layout import Unsupported
from pf_connector.wire import Failure

from . import table
from .layout import Group, columns


@dataclass
class Copy:
    """What every worker copies before a step: pairs of blocks by group. Without a pair it only
    tells when it has come to this step."""

    key: str
    pairs: list[tuple[str, int, int]] = field(default_factory=list)
    request: str | None = None
    """The request whose state is copied; none if it has ended and makes no further step."""
    boundary: int = 0
    """Tokens of that state."""


class Holds(holding.Holds):
    """The blocks of a vLLM engine that are held; further arguments as
    `pf_connector.holding.Holds`."""

    def __init__(
        self,
        groups: list[Group],
        world: int,
        running: Mapping[str, Any],
        name: Callable[[str], str | None],
        limits: HoldLimits | None = None,
        *,
        speculates: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(world, running, name, limits, clock=clock)
        self._groups = groups
        self._speculates = speculates
        self._manager: Any = None
        self._new: list[Copy] = []

    def bind(self, manager: Any) -> None:
        """The cache manager knows the blocks."""
        self._manager = manager

    # The scheduler's thread.

    def keep(self, request: Any, *, seconds: float, saving: str | None = None, automatic: bool = False) -> int:
        """Keeps the state of a request that has ended, for some seconds or until the agent has
        saved it. Returns its token position. Raises `Unsupported`."""
        known, boundary = len(request.all_token_ids), int(request.num_computed_tokens)
        if boundary > known:
            # A step in flight computes a token that was never chosen.
            if any(group.recurrent for group in self._groups):
                raise Unsupported("the engine has computed beyond the last token")
            boundary = known
        if boundary == 0:
            raise Unsupported("it has no state")
        blocks, held = self._held(request, boundary)
        self._check_room(len(held))
        self._pool.touch(held)
        state = self._add(request, boundary, blocks, held, len(held))
        self._keep(state, seconds, saving, automatic)
        self._new.append(Copy(state.key))
        return boundary

    def step(self, zeroed: Any = None) -> list[Copy]:
        """Once a step, after vLLM has scheduled it: what the workers copy before it. `zeroed` are
        blocks that they clear first."""
        if self.idle and not self._new:
            return []
        wanted = self._begin()
        copies, self._new = self._new, []
        cleared = set(zeroed or ())

        def take(want: Wanted) -> bool:
            if self._take_ended(want):
                return True
            copy = self._take(want, cleared)
            if copy is not None:
                copies.append(copy)
            return copy is not None

        self._serve(wanted, take)
        return copies

    # Within.

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool

    def _all_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def _give_back(self, held: Any) -> None:
        self._pool.free_blocks(reversed(held))

    def _runs(self, request: Any) -> bool:
        return _runs(request)

    def _describe(self, state: State) -> dict[str, Any]:
        return table.sequence(state.request, state.boundary, state.blocks)

    def _held(self, request: Any, boundary: int, moved: Sequence[Group] = ()) -> tuple[dict[str, list[int]], list[Any]]:
        """Block ids by group and column, and the blocks among them that are not null, without the
        last one of groups in `moved`."""
        rows = self._manager.get_blocks(request.request_id).blocks
        blocks = columns(self._groups, tuple([block.block_id for block in row] for row in rows), boundary)
        held = []
        for group in self._groups:
            row = rows[group.index][: -(-boundary // group.block_tokens)]
            if group.recurrent and row[-1].is_null:
                raise Unsupported(f"group {group.name} has no state at {boundary} tokens")
            row = row[-1:] if group.recurrent else row
            held += [block for block in (row[:-1] if group in moved else row) if not block.is_null]
        return blocks, held

    def _take(self, want: Wanted, zeroed: set[int]) -> Copy | None:
        """Holds the state of a running request at the position before this step; `None` if that is
        not possible in this step, or no copy is needed."""
        request = want.request
        boundary = int(request.num_computed_tokens)
        # Tokens of a step in flight may be refused when it has ended.
        unsure = self._speculates and int(getattr(request, "num_in_flight_tokens", 0)) > 0
        if not _runs(request) or boundary == 0 or boundary > len(request.all_token_ids) or unsure:
            return None
        moved = [group for group in self._groups if group.recurrent or boundary % group.block_tokens]
        try:
            blocks, held = self._held(request, boundary, moved)
        except Unsupported as error:
            raise Failure("engine_busy", str(error)) from error
        if self._pool.get_num_free_blocks() < len(moved):
            return None
        fresh = self._pool.get_new_blocks(len(moved))
        if any(block.block_id in zeroed for block in fresh):
            self._pool.free_blocks(fresh)
            return None
        copy = Copy("", request=request.request_id, boundary=boundary)
        for group, target in zip(moved, fresh, strict=True):
            source = blocks[group.name][-1]
            copy.pairs.append((group.name, source, target.block_id))
            blocks[group.name][-1] = target.block_id
        self._pool.touch(held)
        state = self._add(request, boundary, blocks, held + fresh, len(held) + len(fresh))
        copy.key = state.key
        with self._lock:
            state.waiting.append(want.ask)
        return copy


def _runs(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return bool(request.status == RequestStatus.RUNNING)
