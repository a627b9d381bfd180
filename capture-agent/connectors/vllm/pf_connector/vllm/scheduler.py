"""The scheduler's half: page tables for snapshots, and state for requests that have come."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pf_connector.member import Member
from pf_connector.wire import Failure

from . import first_step, table
from . import tally as became
from .asking import Asker, Limits, Question
from .deployment import Identity
from .filling import Fillings, Load
from .layout import Group, Unsupported, columns, groups
from .tally import Tally

log = logging.getLogger("pf_connector")

_WAIT = 0.002
"""Seconds of a step in which the scheduler waits for answers, over all requests; afterwards it looks once a step."""


class Progress:
    """What a request has of its state."""

    def __init__(self, question: Question | None) -> None:
        self.question = question
        """The question, until its answer was used."""
        self.ready: tuple[int, str] | None = None
        """Prefix length and name of a state to be loaded."""
        self.kept = 0
        """Tokens that the engine has, when it was told how many can be loaded."""
        self.fresh = False
        """Whether the engine must not use blocks of its own cache."""
        self.avoids = False
        """Whether vLLM was told so, for its next look at the request."""


class Scheduler:
    """State of the scheduler's half."""

    def __init__(self, identity: Identity, config: Any, limits: Limits | None = None, first_steps: bool = False) -> None:
        self._groups: list[Group] = []
        self._supported = True
        try:
            self._groups = groups(config)
        except Unsupported as error:
            log.error("this engine cannot be captured: %s", error)
            self._supported = False
        self._requests: dict[str, Any] = {}
        self._progress: dict[str, Progress] = {}
        self._reading: dict[str, float] = {}
        self._loads: list[Load] = []
        self._differing: set[str] = set()
        self._first_steps = first_steps
        self._captured: dict[str, int] = {}
        self._avoid: list[tuple[Any, Progress]] = []
        self._manager: Any = None
        self._left = _WAIT
        self._fill = 0
        self._epoch = secrets.token_hex(8)
        self._deterministic = bool(identity.deployment.get("deterministic"))
        self._limits = limits = limits or Limits()
        self._asker: Asker
        registration = {
            "engine": identity.engine,
            "member": "scheduler",
            "verbs": ["table", "request"],
            "world": identity.world,
            "deployment": identity.deployment,
        }
        calls = {"table": self._table, "staged": lambda args: self._asker.staged(args)}
        self.member = Member(identity.socket, registration, calls, prepare=identity.prepare, on_lost=lambda: self._asker.forget())
        self.tally = Tally(self.member)
        self._asker = Asker(self.member, self.tally, limits)
        self._fillings = Fillings(self.member, limits.fill)

    def bind(self, manager: Any) -> None:
        """The cache manager knows the block tables. From now on the agent may ask."""
        self._manager = manager
        if self._supported:
            self._asker.start()
            self.member.start()

    def add(self, request: Any) -> None:
        """A request has come."""
        table.settled(request)
        if self._first_steps:
            first_step.mark(request)
        self._requests[request.request_id] = request

    def finish(self, request: Any) -> None:
        """A request is done, or was aborted."""
        self._requests.pop(request.request_id, None)
        self._reading.pop(request.request_id, None)
        progress = self._progress.pop(request.request_id, None)
        if progress is not None and progress.ready is not None:
            self.tally.add(became.GONE, request.request_id, progress.ready[1])
        if progress is not None and progress.question is not None:
            progress.question.settle()

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that can be loaded beyond `computed`; `None` to be asked again."""
        progress = self._progress.get(request.request_id)
        if progress is None:
            if self._asker.may_ask() and table.matchable(request) and not table.settled(request):
                # Its adapter's files are being read, in a thread.
                begun = self._reading.setdefault(request.request_id, time.monotonic())
                if time.monotonic() - begun <= self._limits.later:
                    return None
                self.tally.add(became.WAITED_TOO_LONG, request.request_id)
                self._progress[request.request_id] = Progress(None)
                return 0
            if (progress := self._begin(request)) is None:
                return 0
        question = progress.question
        if question is not None:
            if not self._asker.poll(question):
                return None
            progress.question, progress.ready = None, question.ready
        if progress.ready is None:
            return 0
        return self._offer(request, progress, computed)

    def _begin(self, request: Any) -> Progress | None:
        if not self._asker.may_ask() or not table.matchable(request):
            return None
        name, tokens = request.request_id, request.all_token_ids
        asked = self._asker.ask(name, tokens, table.salt(request), table.adapter(request))
        if asked is None:
            return None
        # vLLM comes back with a request for which it has no blocks. It is asked for once.
        question = asked.question
        progress = self._progress[name] = Progress(question)
        if question is not None and self._left > 0:
            begun = time.monotonic()
            question.settled.wait(self._left)
            self._left -= time.monotonic() - begun
        return progress

    def _offer(self, request: Any, progress: Progress, computed: int) -> int | None:
        """What to say of a state that lies ready."""
        assert progress.ready is not None
        boundary, _ = progress.ready
        if progress.avoids:
            # vLLM has not looked into its cache. It loads nothing while a request says that it must not.
            progress.avoids = request.skip_reading_prefix_cache = False
        elif progress.fresh and computed > 0:
            self._avoid_cache(request, progress)
            return None
        if boundary >= len(request.all_token_ids):
            return self._decline(request, progress, became.OTHER_LENGTH)
        if computed > boundary or (computed == boundary and self._deterministic):
            # It goes on from a later point of the same prefix.
            return self._decline(request, progress, became.ENGINE_HAS_MORE)
        if computed == boundary and not progress.fresh:
            # Without a block to fill there is no fill, and the agent compares only during a fill.
            self._avoid_cache(request, progress)
            return None
        if computed == boundary:
            return self._decline(request, progress, became.ENGINE_HAS_MORE)
        progress.kept = computed
        return boundary - computed

    def _decline(self, request: Any, progress: Progress, what: str) -> int:
        assert progress.ready is not None
        self.tally.add(what, request.request_id, progress.ready[1])
        progress.ready = None
        return 0

    def _avoid_cache(self, request: Any, progress: Progress) -> None:
        """In the next step vLLM finds none of its own blocks for this request, and allocates all of them."""
        progress.fresh = True
        # Not now: in this step vLLM would take it as a request that loads nothing.
        self._avoid.append((request, progress))

    def allocated(self, request: Any, blocks: tuple[Sequence[Any], ...], external: int) -> None:
        """Blocks were allocated for a request, by group; `external` of its tokens are to be loaded."""
        progress = self._progress.get(request.request_id)
        if external <= 0 or progress is None or progress.ready is None:
            return
        (boundary, restore), kept = progress.ready, progress.kept
        # Asked once more after a failed load or a preemption, the answer is no: the tokens are computed.
        progress.ready = None
        try:
            if kept + external != boundary:
                raise Unsupported(f"state for {boundary} tokens is there, {kept + external} were asked for")
            found = columns(self._groups, tuple([block.block_id for block in row] for row in blocks), boundary)
        except Unsupported as error:
            log.warning("request %s cannot be restored: %s", request.request_id, error)
            self.tally.add(became.OTHER_LENGTH, request.request_id, restore)
            self._loads.append(Load(request.request_id, None))
            return
        self._fill += 1
        load = Load(request.request_id, restore, found, boundary, kept, f"{self._epoch}-{self._fill}")
        self._loads.append(load)
        self._fillings.add(load, self._written(blocks, load))

    def _written(self, blocks: tuple[Sequence[Any], ...], load: Load) -> list[Any]:
        """vLLM's blocks that a fill writes."""
        found = []
        for group in self._groups:
            row = load.blocks[group.name]
            ids = set(row if group.recurrent else row[load.kept // group.block_tokens :])
            found += [block for block in blocks[group.index] if block.block_id in ids and not block.is_null]
        return found

    def differ(self, names: set[str]) -> None:
        """The agent said on some rank that blocks which the engine had are not those of the state."""
        self._differing |= names

    def filled(self, name: str, failed: bool) -> None:
        """The workers are done with a request."""
        differs = name in self._differing
        self._differing.discard(name)
        ended = self._fillings.done(name)
        if ended is None:
            return
        load, late = ended
        if not failed:
            self.tally.add(became.TAKEN_ON_KEPT if load.kept else became.TAKEN, name, load.restore)
            return
        request, progress = self._requests.get(name), self._progress.get(name)
        if late:
            self.tally.add(became.FILL_LATE, name, load.restore)
        elif differs and load.restore is not None and request is not None and progress is not None and not progress.fresh:
            # The engine has computed those blocks itself, and not bit for bit as they were captured.
            self.tally.add(became.KEPT_DIFFERS, name, load.restore)
            progress.ready, progress.fresh = (load.boundary, load.restore), True
        else:
            self.tally.add(became.FILL_FAILED, name, load.restore)

    def step(self) -> tuple[list[Load], list[str]]:
        """Once a step: loads for the workers, and requests that they must give up."""
        self._left = _WAIT
        self.tally.tell()
        for request, progress in self._avoid:
            if progress.ready is not None:
                progress.avoids = request.skip_reading_prefix_cache = True
        self._avoid = []
        late = self._fillings.step(self._manager)
        loads, self._loads = self._loads, []
        return loads, late

    def captured(self) -> dict[str, int]:
        """Once a step: requests whose tables the agent has read since the last, and where they were."""
        found, self._captured = self._captured, {}
        return found

    def compared(self, steps: list[tuple[str, str, bool]]) -> None:
        """First steps of restored requests, by name and state, and whether they had the recorded logits."""
        for name, restore, equal in steps:
            self.tally.add(became.LOGITS_EQUAL if equal else became.LOGITS_DIFFER, name, restore)

    def close(self) -> None:
        """Leaves the engine."""
        self._asker.close()
        self.member.close()

    def _table(self, args: dict[str, Any]) -> dict[str, Any]:
        wanted = args.get("sequence")
        return {"sequences": list(self._sequences(wanted))}

    def _sequences(self, wanted: str | None) -> Iterable[dict[str, Any]]:
        from vllm.v1.request import RequestStatus

        for name, request in list(self._requests.items()):
            if wanted not in (None, name) or request.status != RequestStatus.RUNNING or request.num_computed_tokens == 0:
                continue
            if getattr(request, "num_in_flight_tokens", 0):
                raise Failure("engine_busy", f"a step of request {name} is in flight: the engine is not paused")
            if self._first_steps:
                self._captured[name] = int(request.num_computed_tokens)
            yield table.sequence(request, self._groups, self._manager.get_block_ids(name))
