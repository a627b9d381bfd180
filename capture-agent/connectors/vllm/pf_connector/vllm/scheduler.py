"""The scheduler's half: state for requests that have come, and state of sequences that is captured
while the engine goes on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pf_connector import tally as became
from pf_connector.asking import Asker, Limits, Question, Search
from pf_connector.holding import HoldLimits
from pf_connector.layout import Unsupported
from pf_connector.member import Member, Verb
from pf_connector.saving import Saves
from pf_connector.tally import Tally
from pf_connector.wishes import NONE, Wishes

from . import first_step, table
from .automatic import Auto, Names, Rate
from .deployment import Identity
from .filling import Fillings, Load
from .holding import Copy, Holds
from .layout import Group, columns, groups

log = logging.getLogger("pf_connector")

_WAIT = 0.002
"""Seconds of a step in which the scheduler waits for answers while the engine has one request only;
otherwise it looks once a step."""

_NO_END = ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED")
"""Ends after which there is nothing to save. A client that goes away aborts its request."""


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
        self.digest: str | None = None
        """The snapshot that it is."""
        self.partly = False
        """Whether it is only the beginning of that."""
        self.searched = False
        """Whether it was looked for in automatic mode."""
        self.tier: str | None = None
        """Where the agent had its state."""
        self.taken: dict[str, Any] | None = None
        """The state that it resumed from: position and digest."""
        self.reason: str | None = None
        """Why it resumed from none."""


class Scheduler:
    """State of the scheduler's half."""

    def __init__(
        self,
        identity: Identity,
        config: Any,
        limits: Limits | None = None,
        holds: HoldLimits | None = None,
        *,
        speculates: bool = False,
        first_steps: bool = False,
        auto: Auto | None = None,
        model: str = "",
    ) -> None:
        self._auto = auto
        self._names = None if auto is None else Names(auto.repository, model, identity.engine)
        self._rate = None if auto is None else Rate(auto.saves_per_minute)
        self._groups: list[Group] = []
        self._supported = True
        try:
            self._groups = groups(config)
        except Unsupported as error:
            log.error("this engine cannot be captured: %s", error)
            self._supported = False
        self._requests: dict[str, Any] = {}
        self._wishes: dict[str, Wishes] = {}
        self._unplaced: Any = None
        """The request that vLLM looked at and has found no blocks for."""
        self.holds = Holds(self._groups, identity.world, self._requests, self._named, holds, speculates=speculates)
        self._progress: dict[str, Progress] = {}
        self._reading: dict[str, float] = {}
        self._loads: list[Load] = []
        self._differing: set[str] = set()
        self._first_steps = first_steps
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
            "verbs": ["request", "hold"],
            "world": identity.world,
            "deployment": identity.deployment,
        }
        calls: dict[str, Verb] = {
            "staged": lambda args: self._asker.staged(args),
            "sequences": self.holds.sequences,
            "hold": self.holds.hold,
            "release": self.holds.release,
        }
        self.member = Member(identity.socket, registration, calls, prepare=identity.prepare, on_lost=self._lost)
        self.tally = Tally(self.member)
        self._asker = Asker(self.member, self.tally, limits)
        self._fillings = Fillings(self.member, limits.fill)
        self._saves = Saves(self.member, self.holds, self.tally)

    def bind(self, manager: Any) -> None:
        """The cache manager knows the block tables. From now on the agent may ask."""
        self._manager = manager
        self.holds.bind(manager)
        if self._supported:
            self._asker.start()
            self.member.start()

    def add(self, request: Any) -> None:
        """A request has come."""
        table.settled(request)
        if self._first_steps:
            first_step.mark(request)
        self._requests[request.request_id] = request
        if (wishes := Wishes.of(getattr(request, "kv_transfer_params", None))) is not NONE:
            self._wishes[request.request_id] = wishes
            if wishes.wrong:
                log.warning("request %s: %s", request.request_id, wishes.wrong)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request is done, or was aborted. Returns what its response says of its wishes."""
        self._requests.pop(request.request_id, None)
        self._reading.pop(request.request_id, None)
        progress = self._progress.pop(request.request_id, None)
        said = self._respond(request, progress)
        self._wishes.pop(request.request_id, None)
        if progress is not None and progress.ready is not None:
            self.tally.add(became.GONE, request.request_id, progress.ready[1])
        if progress is not None and progress.question is not None:
            progress.question.settle()
        return said

    def _respond(self, request: Any, progress: Progress | None) -> dict[str, Any] | None:
        taken, reason = (progress.taken, progress.reason) if progress is not None else (None, None)
        wishes = self._wishes.get(request.request_id, NONE)
        resumed = (taken or {}).get("digest")

        def keep(seconds: float, saving: str | None) -> int:
            return self._keep(request, seconds, saving)

        def turn(seconds: float) -> int | None:
            return self._save_turn(request, seconds, wishes, resumed)

        return self._saves.respond(request.request_id, wishes, taken, reason, keep, turn)

    def _save_turn(self, request: Any, seconds: float, wishes: Wishes, resumed: str | None) -> int | None:
        """Automatic mode: saves a turn that has ended, or counts why not. Returns its token
        position if it is kept."""
        auto, names, rate = self._auto, self._names, self._rate
        if auto is None or names is None or rate is None or not (auto.save and wishes.auto) or self._is_nothing_to_save(request, auto):
            return None
        name = request.request_id
        try:
            repository = names.of(wishes.user)
        except ValueError as error:
            log.debug("request %s is not saved: %s", name, error)
            self.tally.add(became.SAVE_NAME, name)
            return None
        if self.holds.saving >= auto.open_saves:
            self.tally.add(became.SAVE_BEHIND, name)
            return None
        if not rate.take(time.monotonic()):
            self.tally.add(became.SAVE_RATE, name)
            return None
        ticket = self._saves.next_ticket()
        try:
            position = self._keep(request, seconds, ticket, automatic=True)
        except Unsupported as error:
            log.debug("request %s is not saved: %s", name, error)
            self.tally.add(became.SAVE_REFUSED, name)
            return None
        # Ordered by time, and unique among the engines that save there.
        epoch, number = ticket.split("-")
        tag = f"auto-{int(time.time() * 1000):013d}-{epoch[:6]}-{number}"
        turn = Wishes(save=f"{repository}:{tag}", push=auto.push, parent=wishes.parent)
        budget = {} if auto.bytes_per_second is None else {"bytes_per_second": int(max(1, auto.bytes_per_second))}
        self._saves.save(name, ticket, turn, resumed, budget)
        return position

    @staticmethod
    def _is_nothing_to_save(request: Any, auto: Auto) -> bool:
        return str(request.status) in _NO_END or int(request.num_computed_tokens) < auto.least

    def _keep(self, request: Any, seconds: float, saving: str | None, automatic: bool = False) -> int:
        status = str(request.status)
        if not self._supported:
            raise Unsupported("this engine cannot be captured")
        if saving is not None and not self.member.registered:
            raise Unsupported("no capture agent is connected")
        if status in _NO_END:
            raise Unsupported(f"the request ended as {status}")
        if getattr(request, "resumable", False):
            raise Unsupported("its input is streamed")
        return self.holds.keep(request, seconds=seconds, saving=saving, automatic=automatic)

    def _named(self, request: str) -> str | None:
        return self._wishes.get(request, NONE).name

    def _lost(self) -> None:
        self._asker.forget()
        self.holds.lost()

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that can be loaded beyond `computed`; `None` to be asked again."""
        self.holds.settle()
        found = self._matched(request, computed)
        if found is not None:
            self._unplaced = request
        return found

    def _matched(self, request: Any, computed: int) -> int | None:
        progress = self._progress.get(request.request_id)
        if progress is None:
            wanted = self._wanted(request)
            if self._asker.may_ask(wanted) and table.matchable(request) and not table.settled(request):
                # Its adapter's files are being read, in a thread.
                begun = self._reading.setdefault(request.request_id, time.monotonic())
                if time.monotonic() - begun <= self._limits.later:
                    return None
                self.tally.add(became.WAITED_TOO_LONG, request.request_id)
                self._refuse(request, became.WAITED_TOO_LONG)
                return 0
            if (progress := self._begin(request, wanted)) is None:
                return 0
        question = progress.question
        if question is not None:
            if not self._asker.poll(question):
                return None
            progress.question, progress.ready = None, question.ready
            progress.reason, progress.digest, progress.partly = question.reason, question.digest, question.partly
            progress.tier = question.tier
            if progress.ready is None and progress.searched:
                self.tally.add(became.HIT_ENGINE if computed > 0 else became.MISS, request.request_id)
        if progress.ready is None:
            return 0
        return self._offer(request, progress, computed)

    def _refuse(self, request: Any, reason: str) -> Progress:
        progress = self._progress[request.request_id] = Progress(None)
        progress.reason = reason
        return progress

    def _wanted(self, request: Any) -> str | Search | None:
        """The snapshot that a request names, or where it is looked for."""
        wishes = self._wishes.get(request.request_id, NONE)
        if wishes.resume is not None:
            return wishes.resume
        auto = self._auto
        if auto is None or self._names is None or not (auto.match and wishes.auto) or len(request.all_token_ids) <= auto.least:
            return None
        try:
            return Search(self._names.of(wishes.user), auto.match_limit, auto.least)
        except ValueError as error:
            log.debug("request %s is not looked for: %s", request.request_id, error)
            return None

    def _begin(self, request: Any, wanted: str | Search | None) -> Progress | None:
        resume = wanted if isinstance(wanted, str) else None
        if not self._asker.may_ask(wanted):
            return None if resume is None else self._refuse(request, "no capture agent is connected")
        if not table.matchable(request):
            return None if resume is None else self._refuse(request, "its tokens do not tell its state, or vLLM computes all of them")
        name, tokens = request.request_id, request.all_token_ids
        asked = self._asker.ask(name, tokens, table.salt(request), table.adapter(request), wanted)
        if asked is None:
            return None
        # vLLM comes back with a request for which it has no blocks. It is asked for once.
        question = asked.question
        progress = self._progress[name] = Progress(question)
        progress.reason = became.AGENT_SILENT if question is None else None
        progress.searched = isinstance(wanted, Search)
        if question is not None and self._left > 0 and len(self._requests) <= 1:
            # Nothing else waits for this step.
            begun = time.monotonic()
            question.settled.wait(self._left)
            self._left -= time.monotonic() - begun
        return progress

    def _offer(self, request: Any, progress: Progress, computed: int) -> int | None:
        """What to say of a state that lies ready."""
        assert progress.ready is not None
        boundary, _ = progress.ready
        if progress.avoids:
            # vLLM has not looked into its cache. It loads nothing while a request says that it must
            # not.
            progress.avoids = request.skip_reading_prefix_cache = False
        elif progress.fresh and computed > 0:
            self._avoid_cache(request, progress)
            return None
        if boundary >= len(request.all_token_ids):
            return self._decline(request, progress, became.OTHER_LENGTH)
        if computed > boundary or (computed == boundary and (self._deterministic or progress.partly)):
            # It goes on from a later point of the same prefix. The beginning of a snapshot saves no
            # work if the engine has it.
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
        if progress.searched and what == became.ENGINE_HAS_MORE:
            self.tally.add(became.HIT_ENGINE, request.request_id)
        progress.ready, progress.reason = None, what
        return 0

    def _avoid_cache(self, request: Any, progress: Progress) -> None:
        """In the next step vLLM finds none of its own blocks for this request, and allocates all of
        them."""
        progress.fresh = True
        # Not now: in this step vLLM would take it as a request that loads nothing.
        self._avoid.append((request, progress))

    def placed(self, request: Any) -> None:
        """vLLM has blocks for a request."""
        if self._unplaced is request:
            self._unplaced = None

    def allocated(self, request: Any, blocks: tuple[Sequence[Any], ...], external: int) -> None:
        """Blocks were allocated for a request, by group; `external` of its tokens are to be
        loaded."""
        progress = self._progress.get(request.request_id)
        if external <= 0 or progress is None or progress.ready is None:
            return
        (boundary, restore), kept = progress.ready, progress.kept
        # Asked once more after a failed load or a preemption, the answer is no: the tokens are
        # computed.
        progress.ready = None
        try:
            if kept + external != boundary:
                raise Unsupported(f"state for {boundary} tokens is there, {kept + external} were asked for")
            found = columns(self._groups, tuple([block.block_id for block in row] for row in blocks), boundary)
        except Unsupported as error:
            log.warning("request %s cannot be restored: %s", request.request_id, error)
            self.tally.add(became.OTHER_LENGTH, request.request_id, restore)
            progress.reason = became.OTHER_LENGTH
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
        """The agent said on some rank that blocks which the engine had are not those of the
        state."""
        self._differing |= names

    def filled(self, name: str, failed: bool) -> None:
        """The workers are done with a request."""
        differs = name in self._differing
        self._differing.discard(name)
        ended = self._fillings.done(name)
        if ended is None:
            return
        load, late = ended
        request, progress = self._requests.get(name), self._progress.get(name)
        if not failed:
            self.tally.add(became.TAKEN_ON_KEPT if load.kept else became.TAKEN, name, load.restore, load.fill)
            if progress is not None:
                progress.taken = {"position": load.boundary, "digest": progress.digest}
                if progress.searched and progress.tier in became.HITS:
                    self.tally.add(became.HITS[progress.tier], name)
            return
        if progress is not None:
            progress.reason = became.FILL_LATE if late else became.FILL_FAILED
        if late:
            self.tally.add(became.FILL_LATE, name, load.restore, load.fill)
        elif differs and load.restore is not None and request is not None and progress is not None and not progress.fresh:
            # The engine has computed those blocks itself, and not bit for bit as they were
            # captured.
            self.tally.add(became.KEPT_DIFFERS, name, load.restore, load.fill)
            progress.ready, progress.fresh = (load.boundary, load.restore), True
        else:
            self.tally.add(became.FILL_FAILED, name, load.restore, load.fill)

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
        if self.holds.keeps and self._lacks_blocks():
            self.holds.make_room()
        self._unplaced = None
        return loads, late

    def copies(self, zeroed: Any) -> list[Copy]:
        """Once a step: what the workers copy before it. `zeroed` are blocks that they clear
        first."""
        return self.holds.step(zeroed)

    def compared(self, steps: list[tuple[str, str, bool]]) -> None:
        """First steps of restored requests, by name and state, and whether they had the recorded
        logits."""
        for name, restore, equal in steps:
            self.tally.add(became.LOGITS_EQUAL if equal else became.LOGITS_DIFFER, name, restore)

    def _lacks_blocks(self) -> bool:
        """Whether vLLM has too few free blocks for the request that it has found none for, if it
        has none of its tokens, or for the next step of those that run: then it would preempt
        one."""
        pool = getattr(self._manager, "block_pool", None)
        if pool is None:
            return False
        free, unplaced = int(pool.get_num_free_blocks()), self._unplaced
        if unplaced is not None:
            needed = sum(1 if group.recurrent else -(-len(unplaced.all_token_ids) // group.block_tokens) for group in self._groups)
            if free < needed:
                return True
        return free < sum(self._next_blocks(request) for request in self._requests.values())

    def _next_blocks(self, request: Any) -> int:
        """Blocks that a request needs for the step after this one; none if it does not run."""
        if request.num_computed_tokens == 0:
            # It waits, was preempted, or begins in this step.
            return 0
        # This step computes at least one token. The next one adds another.
        tokens = max(len(request.all_token_ids), int(request.num_computed_tokens) + 1) + 1
        rows = self._manager.get_blocks(request.request_id).blocks
        return sum(max(0, -(-tokens // group.block_tokens) - len(rows[group.index])) for group in self._groups)

    def close(self) -> None:
        """Leaves the engine."""
        self._asker.close()
        self.member.close()
