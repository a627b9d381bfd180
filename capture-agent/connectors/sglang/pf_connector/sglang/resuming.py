"""State for requests that wait: asked for, filled into slots of its own, given to the tree, and
then found there by SGLang itself.

A request whose state is on its way stays in SGLang's queue and is not scheduled; others are. Its
slots come from SGLang's allocator and belong to nothing until the agent has filled and proven
them. Then the tree takes them, in a place of their own: the key has the snapshot's digest. So
only requests that resume from this snapshot find them, and their pages are those of the
snapshot, bit by bit, also if SGLang has computed the same tokens itself. Forks of one snapshot
share them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pf_connector import tally as became
from pf_connector.asking import Asker, Limits, Question
from pf_connector.fence import Fences
from pf_connector.layout import Unsupported
from pf_connector.member import Member
from pf_connector.memory import event
from pf_connector.tally import Tally
from pf_connector.wire import Failure, Lost

from .buffers import GROUP, blocks_of
from .holding import Tree
from .view import View, unfit

log = logging.getLogger("pf_connector")


@dataclass
class _Fill:
    """Slots that the agent fills."""

    slots: Any
    answer: Future[dict[str, Any]]
    args: dict[str, Any]
    due: float
    event: Any
    """After the work that SGLang had launched when the slots were free. The agent waits for it."""


class Resume:
    """What a request has of its state."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.question: Question | None = None
        self.ready: tuple[int, str] | None = None
        """Prefix length and name of the state."""
        self.digest: str | None = None
        """The snapshot that it is."""
        self.since = 0.0
        """When it was ready."""
        self.fill: _Fill | None = None
        self.lock: Any = None
        """Of its path in the tree, until SGLang has locked it for the request."""
        self.taken: dict[str, Any] | None = None
        """The state that it resumes from: position and digest."""
        self.reason: str | None = None
        """Why it resumes from none."""

    @property
    def waits(self) -> bool:
        """Whether the request is not to be scheduled yet."""
        return self.question is not None or self.ready is not None


class Resumes:
    """The requests of an engine that resume, or may. All on the scheduler's thread."""

    def __init__(
        self,
        scheduler: Any,
        tree: Tree,
        member: Member,
        asker: Asker,
        tally: Tally,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._tree = tree
        self._member = member
        self._asker = asker
        self._tally = tally
        self._limits = limits
        self._clock = clock
        self._epoch = secrets.token_hex(8)
        self._fills = 0
        self._all: dict[str, Resume] = {}
        self._open: dict[str, Resume] = {}
        """Those that wait, or have a lock."""
        self._fences = Fences(member, clock)

    @property
    def busy(self) -> bool:
        """Whether slots are taken that belong to nothing."""
        return bool(self._fences) or any(resume.fill is not None for resume in self._open.values())

    def waiting(self) -> frozenset[str]:
        """Ids of requests that are not to be scheduled yet."""
        return frozenset(name for name, resume in self._open.items() if resume.waits)

    def came(self, view: View) -> None:
        """A request has come."""
        name, wanted = view.request_id, view.wishes.resume
        if not self._asker.may_ask(wanted):
            if wanted is not None:
                self._refuse(view, "no capture agent is connected")
            return
        if reason := unfit(view.req):
            if wanted is not None:
                self._refuse(view, reason)
            return
        asked = self._asker.ask(name, view.asked_token_ids, view.salt, None, wanted)
        if asked is None:
            return
        resume = self._all[name] = Resume(view)
        resume.question = asked.question
        if asked.question is None:
            resume.reason = became.AGENT_SILENT
        else:
            self._open[name] = resume

    def _refuse(self, view: View, reason: str) -> None:
        resume = self._all[view.request_id] = Resume(view)
        resume.reason = reason

    def forget(self, name: str) -> Resume | None:
        """A request has ended."""
        resume = self._all.pop(name, None)
        if resume is not None:
            self._open.pop(name, None)
            self._drop(resume)
        return resume

    def step(self) -> None:
        """Once between two steps."""
        if not self._open and not self._fences:
            return
        self._fences.step()
        queued = {req.rid for req in self._scheduler.waiting_queue}
        for name, resume in list(self._open.items()):
            if name not in queued:
                # SGLang runs it, and has a lock of its own, or it was aborted.
                self._drop(resume)
                del self._open[name]
            else:
                self._advance(resume)

    def void(self) -> None:
        """SGLang drops its tree, and what was locked in it. Without a tree there is nothing to
        resume from."""
        for resume in self._open.values():
            resume.lock = None
            if resume.fill is None and resume.taken is not None:
                resume.taken, resume.reason = None, "SGLang dropped its cache"

    # Within.

    def _drop(self, resume: Resume) -> None:
        """Gives everything back that a request has."""
        if resume.question is not None:
            resume.question.settle()
            resume.question = None
        if resume.fill is not None:
            self._give_up(resume.fill)
            resume.fill = None
        if resume.ready is not None:
            self._tally.add(became.GONE, resume.view.request_id, resume.ready[1])
            resume.ready = None
        if resume.lock is not None:
            self._tree.cache.unlock(resume.lock)
            resume.lock = None

    def _advance(self, resume: Resume) -> None:
        if resume.question is not None:
            if not self._asker.poll(resume.question):
                return
            question, resume.question = resume.question, None
            resume.ready, resume.digest, resume.reason = question.ready, question.digest, question.reason
            resume.since = self._clock()
        if resume.ready is not None and resume.fill is None:
            self._place(resume)
        elif resume.fill is not None:
            self._look(resume)

    def _place(self, resume: Resume) -> None:
        """The state lies ready: slots for it, or what the tree has of it."""
        assert resume.ready is not None
        view, (boundary, restore) = resume.view, resume.ready
        tokens = view.all_token_ids
        if boundary % self._tree.page or boundary >= len(tokens):
            # SGLang goes on from whole pages only, and computes one token at least.
            self._decline(resume, became.OTHER_LENGTH)
            return
        own, _ = self._tree.match(self._tree.key(tokens, view.req.extra_key, view.req.cache_salt))
        if own >= boundary and view.wishes.resume is None:
            self._decline(resume, became.ENGINE_HAS_MORE)
            return
        if self._found(resume):
            self._tally.add(became.TAKEN_ON_KEPT, view.request_id, restore)
            return
        place = self._place_of(resume)
        if any(other is not resume and other.fill is not None and self._place_of(other) == place for other in self._open.values()):
            # Another request fills the same.
            return
        slots = self._allocate(boundary)
        if slots is not None:
            self._begin(resume, slots)
        elif self._clock() - resume.since > self._limits.later or not self._scheduler.running_batch.reqs:
            # Without a running request none gives back what would be enough.
            self._decline(resume, became.FILL_FAILED, "SGLang has no room for the state")

    def _allocate(self, count: int) -> Any:
        cache = self._tree.cache
        allocator = cache.token_to_kv_pool_allocator
        allocator.evict_to_free_tokens(cache, count)
        return allocator.alloc(count)

    def _begin(self, resume: Resume, slots: Any) -> None:
        assert resume.ready is not None
        _, restore = resume.ready
        self._fills += 1
        name = f"{self._epoch}-{self._fills}"
        try:
            blocks = blocks_of([int(slot) for slot in slots.tolist()], self._tree.page)
        except Unsupported as error:
            self._free(slots)
            self._decline(resume, became.FILL_FAILED, str(error))
            return
        args: dict[str, Any] = {"restore": restore, "blocks": {GROUP: blocks}, "kept": 0, "fill": name}
        # A step in flight may still write into slots that its request has given back.
        after = event(getattr(self._scheduler, "forward_stream", None))
        if after is not None:
            args["after"] = bytes(after.ipc_handle()).hex()
        resume.fill = _Fill(slots, self._member.submit("fill", args), args, self._clock() + self._limits.fill, after)

    def _look(self, resume: Resume) -> None:
        """Whether the fill has ended."""
        fill, view = resume.fill, resume.view
        assert fill is not None and resume.ready is not None
        restore = resume.ready[1]
        if not fill.answer.done():
            if self._clock() >= fill.due:
                log.warning("request %s: the capture agent has not filled its slots in time", view.request_id)
                resume.fill = None
                self._give_up(fill)
                self._decline(resume, became.FILL_LATE, fill=fill.args["fill"])
            return
        error = fill.answer.exception()
        if isinstance(error, Failure) and error.code == "overloaded" and self._clock() < fill.due:
            # Nothing was begun.
            fill.answer = self._member.submit("fill", fill.args)
            return
        resume.fill = None
        if error is not None:
            log.warning("request %s could not be restored: %s", view.request_id, error)
            if isinstance(error, Lost):
                self._give_up(fill)
            else:
                self._free(fill.slots)
            self._decline(resume, became.FILL_FAILED, fill=fill.args["fill"])
            return
        boundary = resume.ready[0]
        self._tree.insert(self._key(resume, boundary), fill.slots, view.req.priority or 0)
        if self._found(resume):
            self._tally.add(became.TAKEN, view.request_id, restore, fill.args["fill"])
        else:
            self._decline(resume, became.FILL_FAILED, "SGLang's cache did not take the state", fill.args["fill"])

    def _found(self, resume: Resume) -> bool:
        """Whether the tree has the snapshot's own pages. Then the request will find them, and
        they are locked until it has."""
        assert resume.ready is not None
        boundary, _ = resume.ready
        found, node = self._tree.match(self._key(resume, boundary))
        if found < boundary:
            return False
        resume.lock = self._tree.cache.lock(node)
        resume.view.req.extra_key = self._place_of(resume)
        resume.taken = {"position": boundary, "digest": resume.digest}
        resume.ready, resume.reason = None, None
        return True

    def _key(self, resume: Resume, boundary: int) -> Any:
        view = resume.view
        return self._tree.key(view.all_token_ids[:boundary], self._place_of(resume), view.req.cache_salt)

    def _place_of(self, resume: Resume) -> str:
        """The namespace in the tree. The salt says where the request was before."""
        assert resume.ready is not None
        return f"pf:{resume.digest or resume.ready[1]}:{resume.view.salt}"

    def _decline(self, resume: Resume, what: str, reason: str | None = None, fill: str | None = None) -> None:
        assert resume.ready is not None
        self._tally.add(what, resume.view.request_id, resume.ready[1], fill)
        resume.ready, resume.reason = None, reason or what

    def _give_up(self, fill: _Fill) -> None:
        """The agent may still write: the slots come back when it says that it does not."""
        if fill.answer.done() and fill.answer.exception() is None:
            self._free(fill.slots)
        else:
            self._fences.add(fill.args["restore"], fill.args["fill"], lambda: self._free(fill.slots))

    def _free(self, slots: Any) -> None:
        self._tree.cache.token_to_kv_pool_allocator.free(slots)
