"""Whether there is state for a request: asked from a thread of its own, and only while the agent says that something lies ready.

The agent tells which prefix lengths lie ready. A request is asked for by the keys of its prefixes at these lengths, which are computed
once. A request that names a snapshot is asked for in any case, and the agent begins to make that one ready. The scheduler's thread puts a
question into a queue and looks for the answer once a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pf_connector.member import Member
from pf_connector.prefix import Chain, ladder, root
from pf_connector.wire import Failure, Full, Lost, encode_match_keys

from . import tally as became
from .breaker import Breaker, Way
from .tally import Tally

log = logging.getLogger("pf_connector")

_AGAIN = 1.0
"""Seconds after which a state on its way is asked for again without news from the agent."""
_STAGES = (1024, 16384)
"""Prefix lengths up to which a long request is asked for first: as a rule another prompt differs early, and then its other keys are not
computed."""


@dataclass(frozen=True)
class Limits:
    """Bounds on waiting, in seconds; settings of the connector."""

    patience: float = 1.0
    """For an answer. Then no request waits until the agent answers again."""
    later: float = 60.0
    """For a state that is on its way."""
    fill: float = 60.0
    """For blocks to be filled."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Limits:
        """From the settings `patience`, `later_limit`, `fill_limit`."""
        given = {"patience": settings.get("patience"), "later": settings.get("later_limit"), "fill": settings.get("fill_limit")}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Staged:
    """What lies ready, as the agent told last."""

    version: int = -1
    boundaries: tuple[int, ...] = ()
    expected: bool = False


class Question:
    """One request's way to an answer."""

    def __init__(self, request: str, tokens: Sequence[int], salt: str, adapter: str | None, now: float, resume: str | None = None) -> None:
        self.resume = resume
        """The snapshot that the request names."""
        self.first = True
        """Whether the agent was not asked yet."""
        self.digest: str | None = None
        """The snapshot that is ready."""
        self.reason: str | None = None
        """Why there is none."""
        self.request = request
        self.tokens = tokens
        self.length = len(tokens)
        self.salt = salt
        self.adapter = adapter
        self.begun = now
        self.asked: float | None = None
        """When the last question was sent; none while its keys are computed."""
        self.version = -1
        self.stage = 0
        """Number of the stages that it has passed."""
        self.whole = True
        """Whether the last question had the keys of all lengths that lie ready."""
        self.later = False
        self.unsent = False
        """Whether too much waited to be sent."""
        self.ready: tuple[int, str] | None = None
        """Prefix length and name of the state."""
        self.settled = threading.Event()
        """Ready, or nothing will come."""
        self.chain: Chain | None = None

    def settle(self, ready: tuple[int, str] | None = None) -> None:
        """The end of asking."""
        if not self.settled.is_set():
            self.ready = ready
            self.settled.set()


@dataclass(frozen=True)
class Asked:
    """The result of `ask`: whether the request must wait for an answer."""

    question: Question | None
    """None if the request does not wait for an answer."""


class Asker:
    """Asks for all requests of an engine."""

    def __init__(self, member: Member, tally: Tally, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._tally = tally
        self._limits = limits
        self._clock = clock
        self._staged = Staged()
        self._breaker = Breaker()
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pf-keys", daemon=True)

    def start(self) -> None:
        """Begins to answer questions."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._queue.put(None)

    def staged(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `staged`."""
        told = Staged(int(args["version"]), tuple(int(at) for at in args["boundaries"]), bool(args.get("expected")))
        if told.version >= self._staged.version:
            self._staged = told
        return {}

    def forget(self) -> None:
        """The agent went away, and with it what lay ready."""
        self._staged = Staged()
        self._breaker.reset()

    def may_ask(self, resume: str | None = None) -> bool:
        """Whether something lies ready, or is expected, or the request names a snapshot. Costs nothing."""
        return (resume is not None or bool(self._staged.boundaries) or self._staged.expected) and self._member.registered

    def ask(self, request: str, tokens: Sequence[int], salt: str, adapter: str | None, resume: str | None = None) -> Asked | None:
        """Begins to ask for a request; `None` if nothing that lies ready can be for it."""
        if resume is None and not self._fits(self._staged, len(tokens)):
            return None
        now = self._clock()
        way = self._breaker.way(now)
        if way is Way.PASS:
            self._tally.add(became.AGENT_SILENT, request)
            return Asked(None)
        question = Question(request, tokens, salt, adapter, now, resume)
        self._queue.put(question)
        if way is Way.PROBE:
            self._tally.add(became.AGENT_SILENT, request)
            return Asked(None)
        return Asked(question)

    def poll(self, question: Question) -> bool:
        """Whether a question is settled. Asks again, and gives up, as time goes by."""
        if question.settled.is_set():
            return True
        now = self._clock()
        if question.later:
            if now - question.begun > self._limits.later:
                self._give_up(question, became.WAITED_TOO_LONG)
            elif question.asked is not None and (self._staged.version != question.version or now - question.asked > _AGAIN):
                question.later, question.asked = False, None
                self._queue.put(question)
        elif self._breaker.open:
            self._give_up(question, became.AGENT_BUSY if question.unsent else became.AGENT_SILENT)
        elif question.asked is None:
            if now - question.begun > self._limits.later:
                self._give_up(question, became.WAITED_TOO_LONG)
        elif now - question.asked > self._limits.patience:
            self._breaker.failed(now)
            self._give_up(question, became.AGENT_SILENT)
        return question.settled.is_set()

    def _give_up(self, question: Question, what: str) -> None:
        question.settle()
        if question.ready is None:
            question.reason = what
            self._tally.add(what, question.request)

    def _fits(self, staged: Staged, length: int) -> bool:
        """Whether what lies ready may be for a request of this length."""
        return staged.expected or (bool(staged.boundaries) and staged.boundaries[0] < length)

    # The thread, and the one that reads answers.

    def _run(self) -> None:
        while (question := self._queue.get()) is not None:
            if question.settled.is_set():
                continue
            try:
                self._send(question)
            except Exception as error:
                log.warning("request %s cannot be asked for: %s", question.request, error)
                question.settle()

    def _send(self, question: Question) -> None:
        staged = self._staged
        if question.resume is None and not self._fits(staged, question.length):
            question.settle()
            return
        if question.chain is None:
            question.chain = Chain(root(self._member.fingerprint, question.salt, question.adapter), question.tokens)
        chain = question.chain
        deepest = max((at for at in staged.boundaries if at < question.length), default=0)
        upto = next((stage for stage in _STAGES[question.stage :] if stage * 4 <= deepest), deepest)
        lengths = {at for at in staged.boundaries if at <= upto}
        lengths.update(ladder(upto))
        keys = [(at, chain.key(at)) for at in sorted(lengths)]
        question.version, question.whole = staged.version, upto == deepest
        # What the engine has is compared when the blocks are there: it may be equal, and it may not.
        if question.resume is None:
            future = self._member.submit_encoded(
                lambda number: encode_match_keys(number, question.length, 0, question.salt, question.adapter, keys)
            )
        else:
            asked: dict[str, Any] = {"tokens": question.length, "salt": question.salt}
            asked["keys"] = [[at, f"sha256:{key.hex()}"] for at, key in keys]
            if question.adapter is not None:
                asked["adapter"] = question.adapter
            args = {"reference": question.resume, "first": question.first, "request": asked}
            future = self._member.submit("resume", args)
            question.first = False
        question.asked = self._clock()
        future.add_done_callback(lambda future: self._answered(question, future))

    def _answered(self, question: Question, future: Future[dict[str, Any]]) -> None:
        error = future.exception()
        if isinstance(error, Full):
            # Treated like an agent that does not answer.
            question.unsent = True
            self._breaker.failed(self._clock())
            return
        if not isinstance(error, Lost):
            self._breaker.answered()
        if isinstance(error, Failure) and error.code == "overloaded":
            question.later = True
            return
        if error is not None:
            log.info("no state for request %s: %s", question.request, error)
            question.reason = str(error)
            question.settle()
            return
        answer = future.result()
        if not question.whole and answer.get("match") in ("ready", "later"):
            # Nothing speaks against a deeper state yet.
            question.stage, question.asked = question.stage + 1, None
            self._queue.put(question)
            return
        match answer.get("match"):
            case "ready":
                question.digest = answer.get("digest")
                question.settle((int(answer["boundary"]), str(answer["restore"])))
            case "later":
                question.later = True
            case _:
                log.log(
                    logging.DEBUG if question.resume is None else logging.WARNING,
                    "no state for request %s: %s",
                    question.request,
                    answer.get("reason"),
                )
                question.reason = answer.get("reason")
                question.settle()
