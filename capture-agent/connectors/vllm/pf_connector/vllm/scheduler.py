"""The scheduler's half of the connector.

It gives page tables for snapshots, and asks the agent for state of new requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pf_connector.member import Member
from pf_connector.wire import Failure

from . import table
from .deployment import Identity
from .layout import Group, Unsupported, columns, groups

log = logging.getLogger("pf_connector")

_WAIT = 0.002
"""Seconds for which the scheduler waits after a question; later it looks once in each step."""
_AGAIN = 0.02
"""Seconds between two questions about one request whose state is on its way."""
_PATIENCE = 10.0
"""Seconds after which an unanswered question counts as a no."""


@dataclass
class Load:
    """Blocks that every worker has filled for a request."""

    request: str
    restore: str | None
    """The match; none if the blocks cannot be filled and the request must be computed."""
    blocks: dict[str, list[int]]


class Question:
    """The state of one request, from the question to the filled blocks."""

    def __init__(self) -> None:
        self.future: Future[dict[str, Any]] | None = None
        self.asked = 0.0
        self.ready: tuple[int, str] | None = None
        self.computed = 0
        self.over = False

    def poll(self, member: Member, match: dict[str, Any]) -> bool:
        """Asks, and reads answers as they arrive. Returns whether the request is settled."""
        while not self.over and self.ready is None:
            wait = 0.0
            if self.future is None:
                if self.asked and time.monotonic() - self.asked < _AGAIN:
                    return False
                self.asked, wait = time.monotonic(), _WAIT
                self.future = member.submit("match", match)
            try:
                answer = self.future.result(wait)
            except Failure as failure:
                log.info("no state for a request: %s", failure)
                self.over = True
                return True
            except TimeoutError:
                self.over = time.monotonic() - self.asked > _PATIENCE
                return self.over
            self.future = None
            match answer.get("match"):
                case "ready":
                    self.ready = int(answer["boundary"]), str(answer["restore"])
                case "later":
                    return False
                case _:
                    log.debug("no state for a request: %s", answer.get("reason"))
                    self.over = True
        return True


class Scheduler:
    """State of the scheduler's half."""

    def __init__(self, identity: Identity, config: Any) -> None:
        self._groups: list[Group] = []
        self._supported = True
        try:
            self._groups = groups(config)
        except Unsupported as error:
            log.error("this engine cannot be captured: %s", error)
            self._supported = False
        self._requests: dict[str, Any] = {}
        self._questions: dict[str, Question] = {}
        self._loads: list[Load] = []
        self._manager: Any = None
        self._deterministic = bool(identity.deployment.get("deterministic"))
        registration = {
            "engine": identity.engine,
            "member": "scheduler",
            "verbs": ["table", "request"],
            "world": identity.world,
            "deployment": identity.deployment,
        }
        self.member = Member(identity.socket, registration, {"table": self._table}, prepare=identity.prepare)

    def bind(self, manager: Any) -> None:
        """The cache manager knows the block tables. From now on the agent may ask."""
        self._manager = manager
        if self._supported:
            self.member.start()

    def add(self, request: Any) -> None:
        """A request has come."""
        table.settled(request)
        self._requests[request.request_id] = request

    def finish(self, request: Any) -> None:
        """A request is done, or was aborted."""
        self._requests.pop(request.request_id, None)
        question = self._questions.pop(request.request_id, None)
        if question is not None:
            self._abandon(question)

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that can be loaded beyond `computed`; `None` to be asked again."""
        if not table.matchable(request) or not self.member.registered:
            return 0
        if not table.settled(request):
            return None
        tokens = request.all_token_ids
        question = self._questions.setdefault(request.request_id, Question())
        if question.ready is None and not question.over:
            match = {"tokens": [int(token) for token in tokens], "computed": computed, "salt": table.salt(request)}
            if name := table.adapter(request):
                match["adapter"] = name
            if not question.poll(self.member, match):
                return None
        if question.ready is None:
            return 0
        boundary, _ = question.ready
        if boundary >= len(tokens) or not self._takes(computed, boundary):
            self._abandon(question)
            return 0
        question.computed = computed
        return boundary - computed

    def _takes(self, computed: int, boundary: int) -> bool:
        """Whether state for `boundary` tokens is loaded although `computed` are there.

        Their blocks belong to other requests too, and filling writes all blocks. Only where the
        engine computes the same bytes every time does that change nothing.
        """
        return computed == 0 or (computed < boundary and self._deterministic)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        """Blocks were allocated for a request; `external` of its tokens are to be loaded."""
        question = self._questions.get(request.request_id)
        if external <= 0 or question is None or question.ready is None:
            return
        boundary, restore = question.ready
        # Asked once more after a failed load or a preemption, the answer is no: the tokens are
        # computed.
        question.ready, question.over = None, True
        try:
            if question.computed + external != boundary:
                raise Unsupported(f"state for {boundary} tokens is there, {question.computed + external} were asked for")
            self._loads.append(Load(request.request_id, restore, columns(self._groups, blocks, boundary)))
        except Unsupported as error:
            log.warning("request %s cannot be restored: %s", request.request_id, error)
            self._submit_abandon(restore)
            self._loads.append(Load(request.request_id, None, {}))

    def take_loads(self) -> list[Load]:
        """Loads for the workers, in this step."""
        loads, self._loads = self._loads, []
        return loads

    def close(self) -> None:
        """Leaves the engine."""
        self.member.close()

    def _abandon(self, question: Question) -> None:
        if question.future is not None:
            question.future.add_done_callback(self._abandon_answer)
        if question.ready is not None:
            self._submit_abandon(question.ready[1])
        question.future, question.ready, question.over = None, None, True

    def _abandon_answer(self, future: Future[dict[str, Any]]) -> None:
        if future.exception() is None and "restore" in future.result():
            self._submit_abandon(future.result()["restore"])

    def _submit_abandon(self, restore: str) -> None:
        self.member.submit("abandon", {"restore": restore})

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
            yield table.sequence(request, self._groups, self._manager.get_block_ids(name))
