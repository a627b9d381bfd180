"""State of sequences that stays as it is until the agent has copied it, while the engine goes on:
what is held, for which request, and how long.

How an engine holds state is its connector's: vLLM counts one more user of a block, SGLang locks a
node of its tree. Here are the agent's calls, the bounds on time and room, and the states of
requests that have ended.

Only the scheduler's thread touches the engine. The agent's calls come on another thread.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .layout import Unsupported
from .member import Later
from .wire import Failure, Lost

log = logging.getLogger("pf_connector")

BEGIN = 10.0
"""Seconds in which a hold must begin, and in which the workers must be done with a step."""
_REMEMBERED = 1000
"""Holds and sequences whose end is remembered."""


@dataclass(frozen=True)
class HoldLimits:
    """Bounds on state that is held; settings of the connector."""

    hold: float = 120.0
    """Seconds for which the agent may have blocks held."""
    keep: float = 0.0
    """Seconds for which the blocks of a request that has ended are kept."""
    share: float = 0.5
    """Share of all blocks that requests which have ended may keep, for the agent or without it."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> HoldLimits:
        """From the settings `hold_limit`, `keep`, `keep_share`."""
        given = {"hold": settings.get("hold_limit"), "keep": settings.get("keep"), "share": settings.get("keep_share")}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Ask:
    """The agent's call `hold`."""

    hold: str
    save: str | None
    """The ticket of the save that it is for."""
    answer: Later


@dataclass
class State:
    """State at one token position, in blocks of the engine's that are held."""

    key: str
    request: Any
    """The engine's request, with `request_id`, `all_token_ids` and `num_computed_tokens`."""
    boundary: int
    blocks: dict[str, list[int]]
    """By group and column."""
    held: Any
    """What the engine gets back."""
    size: int
    """Blocks that it takes."""
    left: int
    """Workers that have not come to this point."""
    due: float
    """When they must have."""
    ended: bool = False
    """Whether its request has ended. The others are freed with the agent's hold."""
    name: str | None = None
    keep_until: float = 0.0
    saving: str | None = None
    """The ticket of a save that the agent was asked for, until its hold has ended."""
    automatic: bool = False
    """Whether no request asked for that: its blocks are given back when the engine lacks blocks."""
    save_until: float = 0.0
    users: int = 0
    waiting: list[Ask] = field(default_factory=list)


@dataclass
class Wanted:
    """A hold of a running request that the agent has asked for."""

    ask: Ask
    request: Any
    due: float

    @property
    def answer(self) -> Later:
        return self.ask.answer


class Holds(ABC):
    """The state of an engine that is held. `running` maps the ids of the engine's requests to
    them, `name` tells the name that a request gave. `world` workers must come to a step before
    memory is at rest; 0 if it is so between steps."""

    def __init__(
        self,
        world: int,
        running: Mapping[str, Any],
        name: Callable[[str], str | None],
        limits: HoldLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._running = running
        self._name = name
        self.limits = limits or HoldLimits()
        self._clock = clock
        self._epoch = secrets.token_hex(8)
        self._number = 0
        self._lock = threading.Lock()
        self._wanted: list[Wanted] = []
        self._resting: dict[str, State] = {}
        """Not at rest yet, by key."""
        self._ended: dict[str, State] = {}
        """Of requests that have ended, by their ids."""
        self._active: dict[str, tuple[State, Ask, float]] = {}
        """The agent's holds, each with the time of its end."""
        self._over: OrderedDict[str, bool] = OrderedDict()
        """Holds that were released, and whether they had held until then."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Why sequences that have ended cannot be held any more."""
        self._free: list[Any] = []

    # The engine's.

    @abstractmethod
    def _give_back(self, held: Any) -> None:
        """The engine may use these blocks again. On the scheduler's thread."""

    @abstractmethod
    def _runs(self, request: Any) -> bool:
        """Whether a request has state and goes on."""

    @abstractmethod
    def _describe(self, state: State) -> dict[str, Any]:
        """The protocol's `Sequence`. On the thread that answers calls."""

    @abstractmethod
    def _all_blocks(self) -> int:
        """Blocks that the engine has."""

    # The scheduler's thread.

    @property
    def waiting(self) -> bool:
        """Whether a worker has not come to the point from which on blocks are at rest. It needs
        steps for that."""
        return bool(self._resting)

    @property
    def keeps(self) -> bool:
        """Whether blocks of requests that have ended are kept."""
        return bool(self._ended)

    @property
    def saving(self) -> int:
        """States that the agent was asked to save and has not let go of."""
        return sum(state.saving is not None for state in list(self._ended.values()))

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do here."""
        return not (self._wanted or self._resting or self._ended or self._active or self._free)

    def _keep(self, state: State, seconds: float, saving: str | None, automatic: bool = False) -> None:
        """Keeps the state of a request that has ended, for some seconds or until the agent has
        carried out the save `saving`."""
        request, now = state.request, self._clock()
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

    def _begin(self) -> list[Wanted]:
        """Once a step: ends what is due, gives blocks back, and returns the holds that the agent
        wants."""
        with self._lock:
            self._expire(self._clock())
            wanted, self._wanted = self._wanted, []
        self.settle()
        return wanted

    def _serve(self, wanted: list[Wanted], take: Callable[[Wanted], bool]) -> None:
        """Takes each hold that is wanted. `take` returns whether it was taken, and raises
        `Failure` to refuse it; otherwise it is tried again in the next step."""
        now = self._clock()
        for want in wanted:
            try:
                taken = take(want)
            except Failure as error:
                want.answer.set_exception(error)
                continue
            if taken or want.answer.done():
                continue
            if now >= want.due:
                want.answer.set_exception(Failure("engine_busy", f"request {want.request.request_id} was not at rest in time"))
            else:
                with self._lock:
                    self._wanted.append(want)

    def _take_ended(self, want: Wanted) -> bool:
        """Whether its request has ended since the agent asked. Then its kept state is held, at
        once or when it is at rest. Raises `Failure`."""
        if want.request.request_id in self._running:
            return False
        with self._lock:
            self._hold_ended(want.ask, want.request.request_id)
        return True

    def settle(self) -> None:
        """Gives blocks back to the engine that nothing holds any more."""
        if not self._free:
            return
        with self._lock:
            free, self._free = self._free, []
        for held in free:
            self._give_back(held)

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
                    for ask in state.waiting:
                        self._activate(ask, state)
                    state.waiting = []
                    if not state.ended and not state.users:
                        self._let_go(state)

    def make_room(self) -> bool:
        """The engine lacks blocks: gives back those that are only kept. Returns whether there
        were any."""
        with self._lock:
            wanted = {name for name, state in self._ended.items() if state.saving and not state.automatic}
            idle = [name for name, state in self._ended.items() if not (state.users or state.waiting or name in wanted)]
            for name in idle:
                log.info("request %s: its blocks are given back, the engine lacks blocks", name)
                self._drop(name, "the engine lacked blocks")
        self.settle()
        return bool(idle)

    def void(self, reason: str) -> None:
        """Everything that was held may be overwritten from now on, whatever was promised.
        Nothing is given back: the engine has dropped it."""
        failed = []
        with self._lock:
            failed += [want.answer for want in self._wanted]
            self._wanted = []
            for state in self._resting.values():
                failed += [ask.answer for ask in state.waiting]
            self._resting = {}
            for hold in self._active:
                self._remember(self._over, hold, False)
            self._active = {}
            for name, state in self._ended.items():
                if state.saving:
                    log.warning("request %s is not saved: %s", name, reason)
                self._remember(self._gone, name, reason)
            self._ended, self._free = {}, []
        for answer in failed:
            answer.set_exception(Failure("timeout", reason))

    # The thread of the agent's calls.

    def hold(self, args: dict[str, Any]) -> Later:
        """The agent's call `hold`."""
        wanted, ask = str(args["sequence"]), Ask(str(args["hold"]), args.get("save"), Later())
        running = _find(wanted, {name: self._name(name) for name in list(self._running)})
        request = self._running.get(running) if running is not None else None
        with self._lock:
            if request is not None:
                self._wanted.append(Wanted(ask, request, self._clock() + BEGIN))
            else:
                self._hold_ended(ask, wanted)
        return ask.answer

    def release(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `release`."""
        hold = str(args["hold"])
        with self._lock:
            found = self._active.pop(hold, None)
            if found is not None:
                self._remember(self._over, hold, True)
                state, ask, _ = found
                if ask.save is not None and ask.save == state.saving:
                    state.saving = None
                self._unuse(state)
            return {"held": self._over.get(hold, False)}

    def sequences(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `sequences`."""
        found = []
        for request in list(self._running.values()):
            if self._runs(request) and request.num_computed_tokens:
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

    def save_refused(self, request: str, ticket: str, error: BaseException | str) -> None:
        """The agent does not save the state of a request that has ended. A text is the reason of a
        save that no request asked for."""
        log.log(logging.DEBUG if isinstance(error, str) else logging.WARNING, "request %s is not saved: %s", request, error)
        with self._lock:
            state = self._ended.get(request)
            if state is not None and state.saving == ticket:
                state.saving = None

    def lost(self) -> None:
        """The agent went away, and with it what it copied."""
        failed = []
        with self._lock:
            failed += [want.answer for want in self._wanted]
            self._wanted = []
            for state in self._resting.values():
                failed += [ask.answer for ask in state.waiting]
                state.waiting = []
            for state, _, _ in self._active.values():
                self._unuse(state)
            self._active = {}
            for name, state in self._ended.items():
                if state.saving:
                    log.warning("request %s is not saved: the capture agent went away", name)
                    state.saving = None
        for answer in failed:
            answer.set_exception(Lost())

    # Within.

    def _add(self, request: Any, boundary: int, blocks: dict[str, list[int]], held: Any, size: int) -> State:
        self._number += 1
        key = f"{self._epoch}-{self._number}"
        state = State(key, request, boundary, blocks, held, size, self._world, self._clock() + BEGIN)
        if state.left > 0:
            with self._lock:
                self._resting[key] = state
        return state

    def _check_room(self, more: int) -> None:
        """Raises `Unsupported` if requests that have ended would keep too many blocks."""
        most = self.limits.share * self._all_blocks()

        def kept() -> int:
            return sum(state.size for state in self._ended.values()) + more

        if kept() > most:
            self.make_room()
        if kept() > most:
            raise Unsupported(f"requests that have ended keep {kept() - more} blocks already, {most:.0f} are allowed (setting keep_share)")

    # Within, under the lock.

    def _hold_ended(self, ask: Ask, wanted: str) -> None:
        name = _find(wanted, {name: state.name for name, state in self._ended.items()})
        if name is None:
            reason = self._gone.get(wanted)
            raise Failure("timeout" if reason else "sequence_unknown", reason or f"no sequence {wanted!r}")
        state = self._ended[name]
        if state.key in self._resting:
            state.waiting.append(ask)
        else:
            self._activate(ask, state)

    def _activate(self, ask: Ask, state: State) -> None:
        state.users += 1
        self._active[ask.hold] = (state, ask, self._clock() + self.limits.hold)
        ask.answer.set_result(lambda: self._describe(state))

    def _unuse(self, state: State) -> None:
        state.users -= 1
        if not state.ended and not state.users:
            self._let_go(state)

    def _let_go(self, state: State) -> None:
        self._resting.pop(state.key, None)
        held, state.held = state.held, None
        if held is not None:
            self._free.append(held)

    def _drop(self, name: str, reason: str) -> None:
        self._remember(self._gone, name, reason)
        self._let_go(self._ended.pop(name))

    def _expire(self, now: float) -> None:
        for hold, (state, _, end) in list(self._active.items()):
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
                for ask in state.waiting:
                    ask.answer.set_exception(Failure("engine_busy", f"request {state.request.request_id} did not come to rest in time"))
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


def _find(wanted: str, names: Mapping[str, str | None]) -> str | None:
    """The id of the request that is meant: by its id, by the name that it gave, or by its id
    without what the server appends to it. The latest of several. `names` are the given names by
    id."""
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
