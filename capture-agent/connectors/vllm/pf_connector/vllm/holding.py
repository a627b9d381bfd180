"""State of sequences that stays as it is until the agent has copied it, while the engine goes on.

A block is held by counting one more user of it in vLLM's block pool: vLLM gives it to no other request, whatever becomes of its own, and
needs no step to free it. Sealed blocks are held where they are. The last, partly filled block and the recurrent state are overwritten by
the next step: the workers copy them to other blocks before that step's forward pass, when memory is at rest at this token position. A
request that has ended overwrites nothing any more: its own blocks are held.

Only the scheduler's thread touches the pool. The agent's calls come on another thread.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pf_connector.member import Later
from pf_connector.wire import Failure, Lost

from . import table
from .layout import Group, Unsupported, columns

log = logging.getLogger("pf_connector")

_BEGIN = 10.0
"""Seconds in which a hold must begin, and in which the workers must be done with a step."""
_REMEMBERED = 1000
"""Holds and sequences whose end is remembered."""


@dataclass(frozen=True)
class HoldLimits:
    """Bounds on blocks that are held; settings of the connector."""

    hold: float = 120.0
    """Seconds for which the agent may have blocks held."""
    keep: float = 0.0
    """Seconds for which the blocks of a request that has ended are kept."""
    share: float = 0.5
    """Share of all blocks that requests which have ended may keep, for the agent or without it."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> HoldLimits:
        """From `kv_connector_extra_config`: `hold_limit`, `keep`, `keep_share`."""
        given = {"hold": settings.get("hold_limit"), "keep": settings.get("keep"), "share": settings.get("keep_share")}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


@dataclass
class Copy:
    """What every worker copies before a step: pairs of blocks by group. Without a pair it only tells when it has come to this step."""

    key: str
    pairs: list[tuple[str, int, int]] = field(default_factory=list)
    request: str | None = None
    """The request whose state is copied; none if it has ended and makes no further step."""
    boundary: int = 0
    """Tokens of that state."""


@dataclass
class _State:
    """State at one token position, in blocks of vLLM's that are held."""

    key: str
    request: Any
    boundary: int
    blocks: dict[str, list[int]]
    """By group and column."""
    held: list[Any]
    """vLLM's blocks."""
    left: int
    """Workers that have not come to this point."""
    due: float
    """When they must have."""
    ended: bool = False
    """Whether its request has ended. The others are freed with the agent's hold."""
    name: str | None = None
    keep_until: float = 0.0
    saving: bool = False
    """Whether the agent was asked to save it."""
    automatic: bool = False
    """Whether no request asked for that: its blocks are given back when vLLM lacks blocks."""
    save_until: float = 0.0
    users: int = 0
    waiting: list[tuple[str, Later]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """The protocol's `Sequence`."""
        return table.sequence(self.request, self.boundary, self.blocks)


@dataclass
class _Wanted:
    hold: str
    request: Any
    answer: Later
    due: float


class Holds:
    """The blocks of an engine that are held. `running` maps the ids of the engine's requests to them, `name` tells the name that a
    request gave."""

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
        self._groups = groups
        self._world = world
        self._running = running
        self._name = name
        self.limits = limits or HoldLimits()
        self._speculates = speculates
        self._clock = clock
        self._manager: Any = None
        self._epoch = secrets.token_hex(8)
        self._number = 0
        self._lock = threading.Lock()
        self._wanted: list[_Wanted] = []
        self._new: list[Copy] = []
        self._resting: dict[str, _State] = {}
        """Not at rest yet, by key."""
        self._ended: dict[str, _State] = {}
        """Of requests that have ended, by their ids."""
        self._active: dict[str, tuple[_State, float]] = {}
        """The agent's holds, each with the time of its end."""
        self._over: OrderedDict[str, bool] = OrderedDict()
        """Holds that were released, and whether they had held until then."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Why sequences that have ended cannot be held any more."""
        self._free: list[list[Any]] = []

    def bind(self, manager: Any) -> None:
        """The cache manager knows the blocks."""
        self._manager = manager

    # The scheduler's thread.

    @property
    def waiting(self) -> bool:
        """Whether a worker has not come to the point from which on blocks are at rest. It needs steps for that."""
        return bool(self._resting)

    @property
    def keeps(self) -> bool:
        """Whether blocks of requests that have ended are kept."""
        return bool(self._ended)

    @property
    def saving(self) -> int:
        """States that the agent was asked to save and has not let go of."""
        return sum(state.saving for state in list(self._ended.values()))

    def keep(self, request: Any, *, seconds: float, saving: bool, automatic: bool = False) -> int:
        """Keeps the state of a request that has ended, for some seconds or until the agent has saved it. Returns its token position.
        Raises `Unsupported`."""
        known, boundary = len(request.all_token_ids), int(request.num_computed_tokens)
        if boundary > known:
            # A step in flight computes a token that was never chosen.
            if any(group.recurrent for group in self._groups):
                raise Unsupported("the engine has computed beyond the last token")
            boundary = known
        if boundary == 0:
            raise Unsupported("it has no state")
        blocks, held = self._held(request, boundary)
        self._make_room_for(len(held))
        self._pool.touch(held)
        now = self._clock()
        state = self._add(request, boundary, blocks, held)
        state.ended, state.saving, state.name = True, saving, self._name(request.request_id)
        state.automatic = automatic
        state.keep_until, state.save_until = now + seconds, now + self.limits.hold
        with self._lock:
            if (other := self._ended.pop(request.request_id, None)) is not None:
                # Of an earlier request with this id: it is freed with the agent's hold.
                other.ended = False
                if not (other.users or other.waiting):
                    self._let_go(other)
            self._ended[request.request_id] = state
            self._new.append(Copy(state.key))
        return boundary

    def step(self, zeroed: Any = None) -> list[Copy]:
        """Once a step, after vLLM has scheduled it: what the workers copy before it. `zeroed` are blocks that they clear first."""
        if not (self._wanted or self._new or self._resting or self._ended or self._active or self._free):
            return []
        now = self._clock()
        with self._lock:
            self._expire(now)
            wanted, self._wanted = self._wanted, []
            copies, self._new = self._new, []
        self.settle()
        for want in wanted:
            try:
                copy = self._take(want, set(zeroed or ()))
            except Failure as error:
                want.answer.set_exception(error)
                continue
            if copy is not None:
                copies.append(copy)
            elif not want.answer.done() and now >= want.due:
                want.answer.set_exception(Failure("engine_busy", f"request {want.request.request_id} was not at rest in time"))
            elif not want.answer.done():
                with self._lock:
                    self._wanted.append(want)
        return copies

    def settle(self) -> None:
        """Gives blocks back to vLLM that nothing holds any more."""
        if not self._free:
            return
        with self._lock:
            free, self._free = self._free, []
        for blocks in free:
            self._pool.free_blocks(reversed(blocks))

    def copied(self, counts: Mapping[str, int]) -> None:
        """Workers have come to these points; how many to each."""
        with self._lock:
            for key, count in counts.items():
                state = self._resting.get(key)
                if state is None:
                    continue
                state.left -= count
                if state.left <= 0:
                    del self._resting[key]
                    for hold, answer in state.waiting:
                        self._activate(hold, state, answer)
                    state.waiting = []
                    if not state.ended and not state.users:
                        self._let_go(state)

    def make_room(self) -> bool:
        """vLLM lacks blocks: gives back those that are only kept. Returns whether there were any."""
        with self._lock:
            wanted = {name for name, state in self._ended.items() if state.saving and not state.automatic}
            idle = [name for name, state in self._ended.items() if not (state.users or state.waiting or name in wanted)]
            for name in idle:
                log.info("request %s: its blocks are given back, vLLM lacks blocks", name)
                self._drop(name, "vLLM lacked blocks")
        self.settle()
        return bool(idle)

    # The thread of the agent's calls.

    def hold(self, args: dict[str, Any]) -> Later:
        """The agent's call `hold`."""
        hold, wanted, answer = str(args["hold"]), str(args["sequence"]), Later()
        running = _find(wanted, {name: self._name(name) for name in list(self._running)})
        request = self._running.get(running) if running is not None else None
        with self._lock:
            if request is not None:
                self._wanted.append(_Wanted(hold, request, answer, self._clock() + _BEGIN))
            else:
                self._hold_ended(hold, wanted, answer)
        return answer

    def release(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `release`."""
        hold = str(args["hold"])
        with self._lock:
            found = self._active.pop(hold, None)
            if found is not None:
                self._remember(self._over, hold, True)
                found[0].saving = False
                self._unuse(found[0])
            return {"held": self._over.get(hold, False)}

    def sequences(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `sequences`."""
        found = []
        for request in list(self._running.values()):
            if _runs(request) and request.num_computed_tokens:
                boundary = min(int(request.num_computed_tokens), len(request.all_token_ids))
                found.append(_listed(request, self._name(request.request_id), "running", boundary))
        now = self._clock()
        with self._lock:
            ended = list(self._ended.values())
        for state in ended:
            until = max(state.keep_until, state.save_until if state.saving else 0.0)
            if until > now or state.users:
                left = {"kept_seconds": round(max(0.0, until - now), 1)}
                found.append(_listed(state.request, state.name, "ended", state.boundary) | left)
        return {"sequences": found}

    def save_refused(self, request: str, error: BaseException | str) -> None:
        """The agent does not save the state of a request that has ended."""
        log.log(logging.DEBUG if isinstance(error, str) else logging.WARNING, "request %s is not saved: %s", request, error)
        with self._lock:
            state = self._ended.get(request)
            if state is not None:
                state.saving = False

    def lost(self) -> None:
        """The agent went away, and with it what it copied."""
        failed = []
        with self._lock:
            failed += [want.answer for want in self._wanted]
            self._wanted = []
            for state in self._resting.values():
                failed += [answer for _, answer in state.waiting]
                state.waiting = []
            for state, _ in self._active.values():
                self._unuse(state)
            self._active = {}
            for name, state in self._ended.items():
                if state.saving:
                    log.warning("request %s is not saved: the capture agent went away", name)
                    state.saving = False
        for answer in failed:
            answer.set_exception(Lost())

    # Within.

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool

    def _held(self, request: Any, boundary: int, moved: Sequence[Group] = ()) -> tuple[dict[str, list[int]], list[Any]]:
        """Block ids by group and column, and the blocks among them that are not null, without the last one of groups in `moved`."""
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

    def _add(self, request: Any, boundary: int, blocks: dict[str, list[int]], held: list[Any]) -> _State:
        self._number += 1
        key = f"{self._epoch}-{self._number}"
        state = _State(key, request, boundary, blocks, held, self._world, self._clock() + _BEGIN)
        with self._lock:
            self._resting[key] = state
        return state

    def _take(self, want: _Wanted, zeroed: set[int]) -> Copy | None:
        """Holds the state of a running request at the position before this step; `None` if that is not possible in this step, or no
        copy is needed."""
        request = want.request
        if request.request_id not in self._running:
            with self._lock:
                self._hold_ended(want.hold, request.request_id, want.answer)
            return None
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
        state = self._add(request, boundary, blocks, held + fresh)
        copy.key = state.key
        with self._lock:
            state.waiting.append((want.hold, want.answer))
        return copy

    def _make_room_for(self, more: int) -> None:
        most = self.limits.share * self._pool.num_gpu_blocks

        def kept() -> int:
            return sum(len(state.held) for state in self._ended.values()) + more

        if kept() > most:
            self.make_room()
        if kept() > most:
            raise Unsupported(f"requests that have ended keep {kept() - more} blocks already, {most:.0f} are allowed (setting keep_share)")

    # Within, under the lock.

    def _hold_ended(self, hold: str, wanted: str, answer: Later) -> None:
        name = _find(wanted, {name: state.name for name, state in self._ended.items()})
        if name is None:
            reason = self._gone.get(wanted)
            raise Failure("timeout" if reason else "sequence_unknown", reason or f"no sequence {wanted!r}")
        state = self._ended[name]
        if state.key in self._resting:
            state.waiting.append((hold, answer))
        else:
            self._activate(hold, state, answer)

    def _activate(self, hold: str, state: _State, answer: Later) -> None:
        state.users += 1
        self._active[hold] = (state, self._clock() + self.limits.hold)
        answer.set_result(state.describe)

    def _unuse(self, state: _State) -> None:
        state.users -= 1
        if not state.ended and not state.users:
            self._let_go(state)

    def _let_go(self, state: _State) -> None:
        self._resting.pop(state.key, None)
        held, state.held = state.held, []
        if held:
            self._free.append(held)

    def _drop(self, name: str, reason: str) -> None:
        self._remember(self._gone, name, reason)
        self._let_go(self._ended.pop(name))

    def _expire(self, now: float) -> None:
        for hold, (state, end) in list(self._active.items()):
            if now >= end:
                log.warning("request %s: the capture agent has not copied its blocks in %.0f s", state.request.request_id, self.limits.hold)
                del self._active[hold]
                self._remember(self._over, hold, False)
                self._unuse(state)
        for name, state in list(self._ended.items()):
            if state.users or state.waiting:
                continue
            if now >= max(state.keep_until, state.save_until if state.saving else 0.0):
                if state.saving:
                    log.warning("request %s is not saved: the capture agent has not begun in %.0f s", name, self.limits.hold)
                self._drop(name, "its blocks were given back before the agent came for them")
        for state in list(self._resting.values()):
            if now >= state.due:
                for _, answer in state.waiting:
                    answer.set_exception(Failure("engine_busy", f"request {state.request.request_id} did not come to rest in time"))
                state.waiting = []
                if state.ended:
                    self._drop(state.request.request_id, "its blocks did not come to rest")
                else:
                    self._let_go(state)

    @staticmethod
    def _remember(where: OrderedDict[str, Any], key: str, value: Any) -> None:
        where[key] = value
        while len(where) > _REMEMBERED:
            where.popitem(last=False)


def _runs(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return bool(request.status == RequestStatus.RUNNING)


def _find(wanted: str, names: Mapping[str, str | None]) -> str | None:
    """The id of the request that is meant: by its id, by the name that it gave, or by its id without what the server appends to it. The
    latest of several. `names` are the given names by id."""
    if wanted in names:
        return wanted
    for matches in (lambda one, name: name == wanted, lambda one, name: re.sub("-[0-9a-f]{8}$", "", one) == wanted):
        for one in reversed(list(names)):
            if matches(one, names[one]):
                return one
    return None


def _listed(request: Any, name: str | None, state: str, boundary: int) -> dict[str, Any]:
    found = {"id": request.request_id, "state": state, "tokens": len(request.all_token_ids), "boundary": boundary}
    return found if name is None else found | {"name": name}
