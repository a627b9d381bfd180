"""Whether there is state for a request: asked from a thread of its own, and only while the agent
says that something lies ready.

The agent tells which prefix lengths lie ready. A request is asked for by the keys of its prefixes
at these lengths, which are computed once; a long one by those of its beginning, and then by its
tokens: packing them is a tenth of the work. The tokens are also sent if a state can be used up to a
token before its end, and the keys do not tell how far. A request that names a snapshot is asked for
in any case, by keys alone, and the agent begins to make that one ready. In automatic mode the agent
looks for each request in its store and its registry, by the tokens. The scheduler's thread puts a
question into a queue and looks for the answer once a step.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pf_connector.member import Member
from pf_connector.prefix import Chain, ladder, root
from pf_connector.tokens import Packed
from pf_connector.wire import Failure, Full, Lost, encode_match_keys

from . import tally as became
from .breaker import Breaker, Way
from .tally import Tally

log = logging.getLogger("pf_connector")

_AGAIN = 1.0
"""Seconds after which a state on its way is asked for again without news from the agent."""
_TELL = 1.0
"""Seconds without a question after which counts are told: an engine without requests has no
steps."""
_STAGES = (1024, 16384)
"""Prefix lengths up to which a long request is asked for first: as a rule another prompt differs
early, and then its other keys are not computed."""
_KEYS = _STAGES[-1]
"""The longest prefix whose key is computed for a request that names no snapshot. Its tokens are
sent instead of longer ones."""


@dataclass(frozen=True)
class Limits:
    """Bounds on waiting, in seconds; settings of the connector."""

    answer: float = 1.0
    """For an answer. Then no request waits until the agent answers again."""
    later: float = 60.0
    """For a state that is on its way."""
    fill: float = 60.0
    """For blocks to be filled."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Limits:
        """From the settings `answer_limit`, `later_limit`, `fill_limit`."""
        given = {"answer": settings.get("answer_limit"), "later": settings.get("later_limit"), "fill": settings.get("fill_limit")}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Search:
    """Automatic mode: where the agent looks for the state of a request."""

    repository: str
    limit: float
    """Seconds that the request waits."""
    least: int
    """Tokens that a state must save it."""


@dataclass(frozen=True)
class Staged:
    """What lies ready, as the agent told last."""

    version: int = -1
    boundaries: tuple[int, ...] = ()
    expected: bool = False
    shortest: int | None = None
    """The shortest prefix at which a state can be used before its end; none if no state can."""

    @property
    def least(self) -> int:
        """The shortest prefix that can be of use. Something lies ready."""
        return self.boundaries[0] if self.shortest is None else min(self.boundaries[0], self.shortest)

    def deepest(self, length: int) -> int:
        """The longest prefix of a request of this length whose key can be of use."""
        if self.shortest is not None and self.boundaries:
            return min(self.boundaries[-1], length - 1)
        return max((at for at in self.boundaries if at < length), default=0)


class Question:
    """One request's way to an answer."""

    def __init__(
        self,
        request: str,
        tokens: Sequence[int],
        salt: str,
        adapter: str | None,
        now: float,
        resume: str | None = None,
        search: Search | None = None,
    ) -> None:
        self.resume = resume
        """The snapshot that the request names."""
        self.search = search
        self.name = ""
        """The name of the search."""
        self.tier: str | None = None
        """Where the agent had the state that is ready."""
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
        self.by_tokens = False
        """Whether the last question had, or the next one has, the tokens instead of keys."""
        self.of: str | None = None
        """The only snapshot that it wants them for."""
        self.partly = False
        """Whether the state that is ready is the beginning of a snapshot."""
        self.later = False
        self.unsent = False
        """Whether too much waited to be sent."""
        self.ready: tuple[int, str] | None = None
        """Prefix length and name of the state."""
        self.settled = threading.Event()
        """Ready, or nothing will come."""
        self.chain: Chain | None = None
        self.packed: Packed | None = None

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
        self._epoch = secrets.token_hex(8)
        self._searches = 0
        self._thread = threading.Thread(target=self._run, name="pf-keys", daemon=True)

    def start(self) -> None:
        """Begins to answer questions."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._queue.put(None)

    def staged(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `staged`."""
        shortest = args.get("shortest")
        boundaries, expected = tuple(int(at) for at in args["boundaries"]), bool(args.get("expected"))
        told = Staged(int(args["version"]), boundaries, expected, None if shortest is None else int(shortest))
        if told.version >= self._staged.version:
            self._staged = told
        return {}

    def forget(self) -> None:
        """The agent went away, and with it what lay ready."""
        self._staged = Staged()
        self._breaker.reset()

    def may_ask(self, wanted: str | Search | None = None) -> bool:
        """Whether something lies ready, or is expected, or the request names a snapshot or is
        looked for. Costs nothing."""
        return (wanted is not None or bool(self._staged.boundaries) or self._staged.expected) and self._member.registered

    def ask(self, request: str, tokens: Sequence[int], salt: str, adapter: str | None, wanted: str | Search | None = None) -> Asked | None:
        """Begins to ask for a request; `None` if nothing that lies ready can be for it."""
        if wanted is None and not self._fits(self._staged, len(tokens)):
            return None
        now = self._clock()
        way = self._breaker.way(now)
        if way is Way.PASS:
            self._tally.add(became.AGENT_SILENT, request)
            return Asked(None)
        resume, search = (None, wanted) if isinstance(wanted, Search) else (wanted, None)
        question = Question(request, tokens, salt, adapter, now, resume, search)
        if search is not None:
            self._searches += 1
            question.name = f"{self._epoch}-{self._searches}"
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
        limit = self._limits.later if question.search is None else question.search.limit
        if question.later:
            if now - question.begun > limit:
                self._give_up(question, became.WAITED_TOO_LONG)
            elif question.asked is not None and (self._staged.version != question.version or now - question.asked > _AGAIN):
                question.later, question.by_tokens, question.asked = False, False, None
                self._queue.put(question)
        elif self._breaker.open:
            self._give_up(question, became.AGENT_BUSY if question.unsent else became.AGENT_SILENT)
        elif question.asked is None:
            if now - question.begun > limit:
                self._give_up(question, became.WAITED_TOO_LONG)
        elif now - question.asked > self._limits.answer:
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
        return staged.expected or (bool(staged.boundaries) and staged.least < length)

    # The thread, and the one that reads answers.

    def _run(self) -> None:
        while True:
            try:
                question = self._queue.get(timeout=_TELL)
            except queue.Empty:
                self._tally.tell()
                continue
            if question is None:
                return
            if question.settled.is_set():
                continue
            try:
                self._send(question)
            except Exception as error:
                log.warning("request %s cannot be asked for: %s", question.request, error)
                question.settle()

    def _send(self, question: Question) -> None:
        staged = self._staged
        if question.search is not None:
            self._send_search(question, question.search)
            return
        if question.resume is None and not self._fits(staged, question.length):
            question.settle()
            return
        if question.by_tokens:
            self._send_tokens(question)
            return
        if question.chain is None:
            question.chain = Chain(root(self._member.fingerprint, question.salt, question.adapter), question.tokens)
        chain = question.chain
        deepest = staged.deepest(question.length)
        upto = next((stage for stage in _STAGES[question.stage :] if stage * 4 <= deepest), deepest)
        if upto > _KEYS and question.resume is None:
            question.version, question.whole, question.by_tokens = staged.version, True, True
            self._send_tokens(question)
            return
        lengths = {at for at in staged.boundaries if at <= upto}
        lengths.update(ladder(upto))
        keys = [(at, chain.key(at)) for at in sorted(lengths)]
        question.version, question.whole = staged.version, upto == deepest
        # The engine's own blocks are compared later, when the others are there: they may differ.
        if question.resume is None:
            future = self._member.submit_encoded(
                lambda number: [encode_match_keys(number, question.length, 0, question.salt, question.adapter, keys)]
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

    def _send_search(self, question: Question, search: Search) -> None:
        args: dict[str, Any] = {"name": question.name}
        if question.first:
            args |= {"repository": search.repository, "least": search.least, "limit_ms": int(search.limit * 1000)}
            args["request"] = _by_tokens(question)
        question.version, question.whole = self._staged.version, True
        future = self._member.submit("find", args)
        question.asked, question.first = self._clock(), False
        future.add_done_callback(lambda future: self._answered(question, future))

    def _send_tokens(self, question: Question) -> None:
        asked = _by_tokens(question)
        if question.of is not None:
            asked["of"] = question.of
        future = self._member.submit("match", asked)
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
            # Nothing was begun.
            question.later, question.first = True, True
            return
        if error is not None:
            log.info("no state for request %s: %s", question.request, error)
            question.reason = str(error)
            question.settle()
            return
        answer = future.result()
        if not question.whole and answer.get("match") in ("ready", "later", "tokens"):
            # Nothing speaks against a deeper state yet.
            question.stage, question.asked = question.stage + 1, None
            self._queue.put(question)
            return
        match answer.get("match"):
            case "ready":
                question.digest, question.partly = answer.get("digest"), bool(answer.get("partly"))
                question.tier = answer.get("tier")
                question.settle((int(answer["boundary"]), str(answer["restore"])))
            case "later":
                question.later = True
            case "tokens" if not question.by_tokens:
                question.by_tokens, question.of, question.asked = True, answer.get("of"), None
                self._queue.put(question)
            case _:
                log.log(
                    logging.DEBUG if question.resume is None else logging.WARNING,
                    "no state for request %s: %s",
                    question.request,
                    answer.get("reason"),
                )
                question.reason = answer.get("reason")
                question.settle()


def _by_tokens(question: Question) -> dict[str, Any]:
    """The protocol's `Match` of a request."""
    if question.packed is None:
        question.packed = Packed.of(question.tokens, question.length)
    asked: dict[str, Any] = {"tokens": question.packed, "salt": question.salt}
    if question.adapter is not None:
        asked["adapter"] = question.adapter
    return asked
