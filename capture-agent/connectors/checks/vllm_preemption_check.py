"""Checks saves, holds and resumes by request while a real OpenAI server of vLLM preempts: its cache
has too few blocks for the requests that run at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outcome import CLOSED, REPLAY, Outcome
from processes import Host, Registry, Server, fresh, note, wait_for
from proxy import Proxy
from vllm_check import write_model
from vllm_server_check import Tokens

from pf_connector.agent import Refused, request

ENGINE = "vllm-0"
BLOCK = 32
BLOCKS = 41
"""Blocks of the cache. vLLM gives one of them to no request."""
LONGEST = 1024
"""Tokens of the longest sequence: vLLM starts only if one fits into the cache."""
AT_ONCE = 6
PROMPT = 40
TURNS = [230 + 10 * number for number in range(AT_ONCE)]
"""Tokens of the answers. With the prompts they need 57 blocks."""
MORE = 100
"""Tokens of an answer after a resume. Six such sequences need 71 blocks."""
NEAR = 1e-4
"""Largest difference of log-probabilities in float32 between batches."""
HOLD_LIMIT = 20
"""The setting `hold_limit`, in seconds."""
LIMIT = 240.0
"""Seconds in which requests at once must have ended, and a captured one must have been
preempted."""
NOTHING = {"keep": 0}
"""Wishes of a request whose blocks are not kept when it has ended."""


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs the check on two hosts, one after the other."""
    fresh(folder)
    registry = Registry(binaries, folder / "registry")
    note("preemption: writing a model with random weights")
    check = _Check(python, binaries, folder, registry, write_model(python, folder / "model", "dense"))
    try:
        with check.host("a"):
            outcomes = check.first()
        with check.host("b"):
            return outcomes + check.second()
    finally:
        registry.stop()


class _Check:
    host_: Host
    server: Server
    proxy: Proxy

    def __init__(self, python: str, binaries: Path, folder: Path, registry: Registry, model: str) -> None:
        self.python, self.binaries, self.folder, self.registry, self.model = python, binaries, folder, registry, model
        random.seed(7)
        self.prompts = [self.prompt(PROMPT) for _ in range(AT_ONCE)]
        self.whole: list[Tokens] = []
        """What each prompt becomes, computed alone."""
        self.saved: list[tuple[int, str, int]] = []
        """Snapshots to resume: the prompt's number, the reference, the tokens of the state."""

    @staticmethod
    def prompt(count: int) -> list[int]:
        """Tokens that no other request has."""
        return [random.randrange(1, 500) for _ in range(count)]

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """A host with an agent and a server whose cache is small."""
        args = ["--dtype", "float32", "--max-model-len", str(LONGEST), "--enforce-eager", "--max-num-seqs", "8", "--seed", "0"]
        args += ["--enable-prompt-tokens-details", "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
        args += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
        with contextlib.ExitStack() as stack:
            # The agent waits for a hold until the check lets its answer pass.
            host = Host(f"host {name}", self.binaries, self.folder / name, self.registry.url, "--engine-timeout", "300")
            stack.callback(host.stop)
            proxy = Proxy(host.folder / "proxy.sock", host.engines)
            stack.callback(proxy.close)
            note(f"preemption: starting an OpenAI server with {BLOCKS - 1} blocks on host {name}")
            socket = host.folder / "proxy.sock"
            server = Server(self.python, host.folder / "server", self.model, ENGINE, socket, args, keep=600, hold_limit=HOLD_LIMIT)
            stack.callback(server.kill)
            server.wait_ready()
            host.wait_ready(ENGINE, server)
            self.host_, self.proxy, self.server = host, proxy, server
            yield

    def first(self) -> list[Outcome]:
        note("preemption: each conversation alone, for comparison")
        for number, prompt in enumerate(self.prompts):
            self.whole.append(Tokens(self.server.complete(prompt, TURNS[number] + MORE, salt=f"alone-{number}", pf=NOTHING)))
        outcomes = [self.saves(), self.held(), self.kept(), *self.stopped()]
        self.host_.wait_pushed()
        note("preemption: killing the server")
        return outcomes

    # Of one host.

    def preemptions(self) -> int:
        """Requests that vLLM has preempted and run again."""
        return int(self.server.metric("vllm:num_preemptions_total"))

    def counts(self) -> Counter[str]:
        """What the agent counts of saves: those that were made, that failed, and that were given up
        before they began."""
        ended = self.host_.counts("pf_agent_saves_total", "outcome")
        given_up = self.host_.counts("pf_agent_takings_total", "what").get("save-dropped-refused", 0)
        saved = ended.get("ok", 0)
        return Counter({"saved": saved, "failed": sum(ended.values()) - saved, "given up": given_up})

    def are_counted(self, before: Counter[str], became: list[dict[str, Any]]) -> bool:
        """Whether the agent comes to count what became of saves."""
        wanted, end = Counter(one["state"] for one in became), time.monotonic() + 10
        while self.counts() - before != wanted:
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def free(self) -> int:
        """Blocks that no request and no hold has, after one more request."""
        # vLLM looks at what the agent has released when it has something to do.
        self.server.complete(self.prompt(5), 3, pf=NOTHING)
        return BLOCKS - 1 - round(self.server.metric("vllm:kv_cache_usage_perc") * (BLOCKS - 1))

    def all_free(self) -> int:
        """Waits until all blocks are free. Returns how many are at last."""
        end, found = time.monotonic() + HOLD_LIMIT + 10, -1
        while (found := self.free()) < BLOCKS - 1 and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def at_once(self, run: Callable[[int], dict[str, Any]]) -> tuple[list[Tokens], float]:
        """One request for each prompt, all at once, and the seconds until the last has ended.
        Raises `TimeoutError` if that is late."""
        begun = time.monotonic()
        with _pool() as pool:
            futures = [pool.submit(run, number) for number in range(AT_ONCE)]
            done = [Tokens(future.result(max(0.0, begun + LIMIT - time.monotonic()))) for future in futures]
        return done, time.monotonic() - begun

    def is_whole(self, number: int, done: Tokens, after: int = 0) -> bool:
        """Whether tokens are those of the prompt's answer after its first `after` tokens."""
        return done.ids == self.whole[number].ids[after : after + len(done.ids)]

    def what_became(self, said: dict[str, Any]) -> dict[str, Any]:
        """What became of a save that a response tells of."""
        return self.host_.saved(said["ticket"]) if "ticket" in said else {"state": "given up", "error": said.get("reason")}

    def ran(self, number: int, **pf: Any) -> dict[str, Any]:
        """A request with a prompt."""
        return self.server.complete(self.prompts[number], TURNS[number], pf={**NOTHING, **pf})

    def saves(self) -> Outcome:
        note(f"preemption: {AT_ONCE} requests at once, each saved")
        before, counted = self.preemptions(), self.counts()
        done, took = self.at_once(lambda number: self.ran(number, save=f"team/agent:many-{number}"))
        became = [self.what_became(one.pf.get("save", {})) for one in done]
        for number, one in enumerate(became):
            if one["state"] == "saved":
                self.saved.append((number, f"team/agent:many-{number}", one["boundary"]))
        preempted, free = self.preemptions() - before, self.all_free()
        right = self.are_counted(counted, became) and all(one["state"] == "saved" or one.get("error") for one in became)
        same = all(self.is_whole(number, one) for number, one in enumerate(done))
        states = [one["state"] for one in became]
        reasons = sorted({str(one["error"]) for one in became if one["state"] != "saved"})
        seen = f"{preempted} preemptions in {took:.1f} s, saves {states}{reasons or ''}, {free} of {BLOCKS - 1} blocks free afterwards"
        right = right and preempted > 0 and "saved" in states and same and free == BLOCKS - 1
        return Outcome("while vLLM preempts, each save is made, or given up with a reason and counted; no block stays held", right, seen)

    def sequences(self, name: str) -> list[dict[str, Any]]:
        """The sequences of this name that can be held now."""
        return [one for one in self.host_.pf("sequences", ENGINE)["sequences"] if one.get("name") == name]

    def held(self) -> Outcome:
        """A request is captured; it is preempted before the agent has copied anything."""
        note("preemption: a capture of a request that is preempted meanwhile")
        before, last = self.preemptions(), AT_ONCE - 1
        with _pool() as pool:
            runs = [pool.submit(self.ran, number) for number in range(last)]
            # vLLM preempts the request that came last.
            time.sleep(0.5)
            runs.append(pool.submit(self.ran, last, name="last"))
            self.wait("the last request", runs, lambda: any(one["boundary"] > PROMPT + 20 for one in self.sequences("last")))
            self.proxy.passes_holds.clear()
            try:
                capture = pool.submit(self.capture, "last", "team/agent:held")
                begun = time.monotonic()
                self.wait("a preemption of the last request", runs, lambda: not self.sequences("last"))
                waited = time.monotonic() - begun
            finally:
                self.proxy.passes_holds.set()
            report = capture.result(LIMIT)
            running = not runs[last].done()
            done = [Tokens(run.result(LIMIT)) for run in runs]
        boundary = report["boundary"]
        self.saved.append((last, "team/agent:held", boundary))
        preempted, free = self.preemptions() - before, self.all_free()
        same = all(self.is_whole(number, one) for number, one in enumerate(done))
        right = running and preempted > 0 and same and free == BLOCKS - 1 and not report["pause_seconds"]
        seen = f"T={boundary}, preempted {waited:.1f} s after the hold and before the copy, {preempted} preemptions, "
        seen += f"{free} of {BLOCKS - 1} blocks free afterwards"
        return Outcome("a request that is preempted while it is held is captured, and its own answer goes on", right, seen)

    def wait(self, what: str, runs: list[Future[dict[str, Any]]], look: Callable[[], bool]) -> None:
        """Waits while the last request runs."""

        def going() -> None:
            self.server.alive()
            if runs[-1].done():
                raise AssertionError(f"the last request ended before {what}: {runs[-1].result()}")

        wait_for(what, look, going)

    def kept(self) -> Outcome:
        """Blocks that are kept between turns, and requests that fit into the cache without them."""
        note("preemption: requests that need the blocks which others keep")
        for number in range(2):
            self.server.complete(self.prompt(PROMPT), TURNS[0], pf={"name": f"kept-{number}"})
        begun = [one["id"] for number in range(2) for one in self.sequences(f"kept-{number}")]
        before = self.preemptions()
        with _pool() as pool:
            done = [Tokens(run.result(LIMIT)) for run in [pool.submit(self.ran, number) for number in range(3)]]
        preempted, left = self.preemptions() - before, [len(self.sequences(f"kept-{number}")) for number in range(2)]
        refused = self.refusal(begun[0])
        free = self.all_free()
        same = all(self.is_whole(number, one) for number, one in enumerate(done))
        right = len(begun) == 2 and preempted == 0 and left == [0, 0] and same and free == BLOCKS - 1
        seen = f"{len(begun)} sequences kept, {sum(left)} left, {preempted} preemptions; a capture then: {refused}"
        return Outcome(
            "blocks that are only kept are given back before vLLM preempts", right and "lacked blocks" in str(refused), seen[:300]
        )

    def capture(self, name: str, reference: str) -> dict[str, Any]:
        """Captures a sequence. Raises `Refused`."""
        body = {"reference": reference, "sequence": name}
        found: dict[str, Any] = request(str(self.host_.control), "POST", f"/v1/engines/{ENGINE}/snapshots", body, timeout=LIMIT)
        return found

    def refusal(self, name: str) -> Refused | None:
        """The refusal to capture a sequence; `None` if it is captured."""
        try:
            self.capture(name, "team/agent:late")
        except Refused as refused:
            return refused
        return None

    def stopped(self) -> list[Outcome]:
        """The agent is stopped while requests save: they keep no more than their share, and not for
        long."""
        note("preemption: the same while the agent is stopped")
        before, counted = self.preemptions(), self.counts()
        agent = self.host_.agent.process.pid
        os.kill(agent, signal.SIGSTOP)
        try:
            done, took = self.at_once(lambda number: self.ran(number, save=f"team/agent:stopped-{number}"))
            preempted = self.preemptions() - before
            free = self.all_free()
        finally:
            os.kill(agent, signal.SIGCONT)
        became = [self.what_became(one.pf.get("save", {})) for one in done]
        states = [one["state"] for one in became]
        reasons = sorted({f"{one['state']}: {one['error']}" for one in became if one["state"] != "saved"})
        told = self.are_counted(counted, became) and all(one["state"] == "saved" or one.get("error") for one in became)
        same = all(self.is_whole(number, one) for number, one in enumerate(done))
        again = Tokens(self.ran(0, save="team/agent:awake"))
        saved = self.what_became(again.pf.get("save", {}))
        return [
            Outcome(
                f"{CLOSED}: with a stopped agent requests that are preempted end all the same, and every block comes back",
                preempted > 0 and same and free == BLOCKS - 1,
                f"{preempted} preemptions in {took:.1f} s, {free} of {BLOCKS - 1} blocks free before the agent continues",
            ),
            Outcome(
                f"{CLOSED}: what was not saved then is said, in the response or by its ticket, and counted",
                told and "given up" in states and saved["state"] == "saved",
                f"{states}; {'; '.join(reasons)}; the next save: {saved['state']}"[:400],
            ),
        ]

    def second(self) -> list[Outcome]:
        note("preemption: resuming each of them on another host")
        exact, taken, far, again = 0, 0, 0.0, 0
        for number, reference, boundary in self.saved:
            tokens, made = self.tokens(number, boundary)
            runs = []
            for fork in range(2):
                done = Tokens(self.server.complete(tokens, MORE, pf={**NOTHING, "resume": reference}))
                runs.append(done)
                taken += done.cached == boundary and done.pf.get("resume", {}).get("position") == boundary
                exact += self.is_whole(number, done, made)
                expected = self.whole[number].scores[made : made + MORE]
                far = max(far, *(abs(one - other) for one, other in zip(done.scores, expected, strict=True)))
                note(f"preemption: {reference}, fork {fork}: {done.pf.get('resume')}")
            again += runs[0].scores == runs[1].scores
        count = len(self.saved)
        outcomes = [
            Outcome(
                "each snapshot continues on another host as its conversation did without interruption",
                exact == taken == 2 * count and far < NEAR,
                f"{exact} of {2 * count} have the same {MORE} tokens, {taken} took the state at T, log-probabilities differ by {far:.2g}",
            ),
            Outcome(f"{REPLAY}: each does so twice with the same log-probabilities, bit for bit", again == count, f"{again} of {count}"),
        ]
        return [*outcomes, self.resumed_at_once()]

    def tokens(self, number: int, boundary: int) -> tuple[list[int], int]:
        """The tokens of a request that resumes at a position, and how many of them are answer."""
        tokens = (self.prompts[number] + self.whole[number].ids)[: boundary + 1]
        return tokens, len(tokens) - len(self.prompts[number])

    def resumed_at_once(self) -> Outcome:
        note(f"preemption: {AT_ONCE} requests at once, each resumed")
        known = {number: (reference, boundary) for number, reference, boundary in reversed(self.saved)}
        before, mades = self.preemptions(), [0] * AT_ONCE

        def run(number: int) -> dict[str, Any]:
            # A conversation whose save was given up has a reference without a snapshot.
            reference, boundary = known.get(number, ("team/agent:none", PROMPT + TURNS[number] - 1))
            tokens, mades[number] = self.tokens(number, boundary)
            return self.server.complete(tokens, MORE, pf={**NOTHING, "resume": reference})

        done, took = self.at_once(run)
        same = sum(self.is_whole(number, one, mades[number]) for number, one in enumerate(done))
        told = [one.pf.get("resume", {}) for one in done]
        preempted, free = self.preemptions() - before, self.all_free()
        taken = sum("digest" in one for one in told)
        right = preempted > 0 and same == AT_ONCE and all("digest" in one or "reason" in one for one in told) and free == BLOCKS - 1
        seen = f"{preempted} preemptions in {took:.1f} s, {same} have the same tokens, {taken} took a state, "
        seen += f"the others say {sorted({one['reason'] for one in told if 'reason' in one})}, {free} of {BLOCKS - 1} blocks free then"
        return Outcome("requests that resume at once and are preempted have the same tokens", right, seen)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests; an error does not wait for them."""
    pool = ThreadPoolExecutor(AT_ONCE + 1)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
