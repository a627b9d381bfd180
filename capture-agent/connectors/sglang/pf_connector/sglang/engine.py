"""One engine of SGLang: its members at the agent, holds for captures, and state for requests that
wait.

Everything that SGLang calls is on its scheduler's thread, between two steps, and never waits.
"""

from __future__ import annotations

import logging
from typing import Any

from pf_connector.asking import Asker, Limits
from pf_connector.holding import HoldLimits
from pf_connector.layout import Unsupported
from pf_connector.member import Member, Verb
from pf_connector.memory import CannotShare
from pf_connector.paths import socket_path
from pf_connector.saving import Saves
from pf_connector.tally import Tally
from pf_connector.wire import Failure

from . import buffers
from .deployment import Identity, identity, options
from .holding import Holds, Tree
from .resuming import Resumes
from .view import KEY, View

log = logging.getLogger("pf_connector")

_SWEEP = 256
"""Steps between two looks for requests that are gone without having run."""


class Engine:
    """An engine whose state can be captured and restored. Use `of`."""

    def __init__(
        self,
        scheduler: Any,
        who: Identity,
        layout: tuple[list[int], dict[str, Any]],
        limits: Limits | None = None,
        holds: HoldLimits | None = None,
    ) -> None:
        """`layout` are the descriptors of the memory, and what the registration says of it."""
        self._scheduler = scheduler
        self._tree = Tree(scheduler.tree_cache)
        self._views: dict[str, View] = {}
        """Requests that came and have not ended, by id."""
        self._steps = 0
        self._who = who
        self._left: str | None = None
        """Why the engine has left the agent for good."""
        limits = limits or Limits()
        self.holds = Holds(self._tree, self._views, self._named, holds)
        self._asker: Asker
        self._resumes: Resumes
        calls: dict[str, Verb] = {
            "staged": lambda args: self._asker.staged(args),
            "sequences": self.holds.sequences,
            "hold": self.holds.hold,
            "release": self.holds.release,
        }
        descriptors, described = layout
        registration = {
            "engine": who.engine,
            "member": "scheduler",
            "verbs": ["request", "hold"],
            "rank": 0,
            "world": 1,
            "deployment": who.deployment,
            **described,
        }
        self.member = Member(who.socket, registration, calls, descriptors=descriptors, prepare=self._prepare, on_lost=self._lost)
        self.tally = Tally(self.member)
        self._asker = Asker(self.member, self.tally, limits)
        self._saves = Saves(self.member, self.holds, self.tally)
        self._resumes = Resumes(scheduler, self._tree, self.member, self._asker, self.tally, limits)

    @classmethod
    def of(cls, scheduler: Any, settings: dict[str, Any]) -> Engine | None:
        """The engine of a scheduler, connected; `None` if it cannot be captured. Then it serves,
        and the log says why."""
        try:
            args = options()
            check(args, scheduler.tree_cache)
            who = identity(args, scheduler.model_config, settings, socket_path(settings.get("socket")))
            shared, group = buffers.describe(scheduler.token_to_kv_pool_allocator.get_kvcache(), who.tag)
        except (Unsupported, CannotShare) as error:
            log.error("this engine cannot be captured: %s", error)
            return None
        described = {"memories": [shared.memory], "groups": [group]}
        engine = cls(scheduler, who, (shared.descriptors, described), Limits.of(settings), HoldLimits.of(settings))
        engine.start()
        return engine

    def start(self) -> None:
        """Begins to connect. From now on the agent may ask."""
        self._asker.start()
        self.member.start()

    def close(self) -> None:
        """Leaves the agent."""
        self._asker.close()
        self.member.close()

    # SGLang's calls.

    def step(self) -> None:
        """Once between two steps."""
        for req in self._scheduler.waiting_queue:
            if req.rid not in self._views:
                self._came(req)
        self.tally.tell()
        self.holds.step()
        self._resumes.step()
        self._make_room()
        self._steps += 1
        if self._steps % _SWEEP == 0:
            self._sweep()

    def waiting(self) -> frozenset[str]:
        """Ids of requests that are not to be scheduled yet."""
        return self._resumes.waiting()

    def finished(self, req: Any) -> None:
        """A request has ended, and its pages are in the tree."""
        view = self._views.get(req.rid)
        if view is None:
            return
        resumed = self._resumes.forget(req.rid)
        taken, reason = (resumed.taken, resumed.reason) if resumed is not None else (None, None)
        try:
            said = self._saves.respond(req.rid, view.wishes, taken, reason, lambda seconds, saving: self._keep(view, seconds, saving))
        finally:
            # Not earlier: its name is looked up when it is kept.
            del self._views[req.rid]
        if said is not None:
            # SGLang puts it into the response's `meta_info`.
            req.customized_info = {**(req.customized_info or {}), KEY: [said[KEY]]}

    @property
    def busy(self) -> bool:
        """Whether slots are taken that belong neither to a request nor to the tree."""
        return self._resumes.busy

    def owns(self, cache: Any) -> bool:
        """Whether this is the engine's tree."""
        return cache is self._tree.cache

    def void(self) -> None:
        """SGLang drops its cache."""
        self.holds.void("SGLang dropped its cache")
        self._resumes.void()

    def leave(self, reason: str) -> None:
        """The engine is not the one that was registered any more. It leaves the agent, and does
        not come back. Never waits."""
        self._left = reason
        self.holds.void(reason)
        self.member.reconnect()

    # Within.

    def _prepare(self) -> dict[str, Any]:
        if self._left is not None:
            raise Failure("fingerprint_mismatch", f"{self._left}: start the engine anew to capture it")
        return self._who.prepare()

    def _came(self, req: Any) -> None:
        view = self._views[req.rid] = View(req)
        if view.wishes.wrong:
            log.warning("request %s: %s", req.rid, view.wishes.wrong)
        self._resumes.came(view)

    def _keep(self, view: View, seconds: float, saving: str | None) -> int:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        if self._left is not None:
            raise Unsupported(self._left)
        if saving is not None and not self.member.registered:
            raise Unsupported("no capture agent is connected")
        if isinstance(view.req.finished_reason, FINISH_ABORT):
            raise Unsupported("the request was aborted")
        return self.holds.keep(view, seconds=seconds, saving=saving)

    def _named(self, request: str) -> str | None:
        view = self._views.get(request)
        return view.wishes.name if view is not None else None

    def _make_room(self) -> None:
        """Gives back what is only kept when SGLang may lack room: for the first request that
        waits, or for the next step."""
        if not self.holds.keeps:
            return
        cache, queue = self._tree.cache, self._scheduler.waiting_queue
        needed = len(queue[0].origin_input_ids) + len(queue[0].output_ids) if queue else 0
        needed += self._tree.page * (1 + len(self._scheduler.running_batch.reqs))
        if cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size() < needed:
            self.holds.make_room()

    def _sweep(self) -> None:
        live = {req.rid for req in self._scheduler.collect_inflight_reqs()} | {req.rid for req in self._scheduler.waiting_queue}
        for name in [name for name, view in self._views.items() if name not in live and not view.req.kv.holds_kv]:
            del self._views[name]
            self._resumes.forget(name)

    def _lost(self) -> None:
        self._asker.forget()
        self.holds.lost()


def check(args: Any, cache: Any) -> None:
    """Raises `Unsupported` for options and a cache that the connector is not written for."""
    if type(cache).__name__ != "UnifiedRadixCache":
        raise Unsupported(f"its cache is a {type(cache).__name__}")
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    reasons = {
        "its cache is switched off (--disable-radix-cache)": cache.disable,
        "it has sliding windows or recurrent state, and the connector holds attention in full only": (
            tuple(cache.tree_components) != (ComponentType.FULL,)
        ),
        "it has several ranks, and the connector is for one": int(args.tp_size) != 1 or int(args.pp_size) != 1,
        "it speculates": args.speculative_algorithm is not None,
        "it is one half of a prefill and decode pair": str(args.disaggregation_mode) != "null",
        "HiCache moves its pages": bool(args.enable_hierarchical_cache) or cache.linker is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)
