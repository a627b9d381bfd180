"""An agent that is stopped, and one that is killed, beside a real vLLM server that serves: it goes on within bounds."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

from outcome import Outcome
from processes import Host, Registry, Stopped, fresh, note, wait_for
from server import Server, Sidecar, Stream
from vllm_check import write_model

ENGINE = "vllm-0"
PATIENCE = 1.0
"""The connector's default: seconds that a request waits for an answer."""
PAUSE_LIMIT = 5.0
SLACK = 3.0
"""Seconds that this machine may take for a step, or the first token of a prompt, beside other work."""
LONG = 1900
BURST = 64
"""Requests at once: twice as many as the agent answers calls of one member."""


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """One server, one host, one agent after another."""
    fresh(folder)
    model = write_model(python, folder / "model", "dense")
    registry = Registry(binaries, folder / "registry")
    host = Host("host A", binaries, folder / "a", registry.url)
    note("vllm-server: starting an OpenAI server and its sidecar")
    server = Server(python, folder / "server", model, host, ENGINE)
    sidecar = None
    try:
        server.ready()
        sidecar = Sidecar(python, folder / "server", server, host, ENGINE, PAUSE_LIMIT)
        host.wait_ready(ENGINE, server)
        return _Check(server, host, f"{registry.url}/real/server").run()
    finally:
        for child in (sidecar, server, host, registry):
            if child is not None:
                child.stop()


class _Check:
    def __init__(self, server: Server, host: Host, reference: str) -> None:
        self.server, self.host, self.reference = server, host, reference
        self.random = random.Random(7)

    def prompt(self, count: int) -> list[int]:
        return [self.random.randrange(1, 500) for _ in range(count)]

    def running(self) -> Stream:
        """A request that runs for a while."""
        stream = self.server.stream(self.prompt(20), LONG)
        stream.reach(5)
        return stream

    def run(self) -> list[Outcome]:
        note("vllm-server: capturing a request, and keeping it ready")
        captured = self.server.stream(prompt := self.prompt(100), 300)
        captured.reach(20)
        report = self.host.pf("snapshot", ENGINE, f"{self.reference}:mid", "--push", "wait")
        boundary = report["boundary"]
        tokens = (prompt + captured.done().tokens)[: boundary + 1]
        self.host.pf("restore", f"{self.reference}:mid", ENGINE)
        outcomes = [self.burst(tokens, boundary), self.stopped(tokens), self.back(tokens, boundary)]
        outcomes += self.stopped_in_a_pause()
        return [*outcomes, *self.killed()]

    def said(self) -> dict[str, int]:
        """What became of requests, as the agent lists it."""
        info = self.host.engine(ENGINE) or {}
        said = dict(info.get("outcomes") or {})
        for ready in info.get("staged") or ():
            for what, count in ready["outcomes"].items():
                said[what] = said.get(what, 0) + count
        return said

    def burst(self, tokens: list[int], boundary: int) -> Outcome:
        note(f"vllm-server: {BURST} requests at once")
        done = [stream.done() for stream in [self.server.stream(tokens, 8) for _ in range(BURST)]]
        taken = sum(one.cached == boundary and len(one.tokens) == 8 for one in done)

        def told() -> dict[str, int]:
            said = self.said()
            return said if said.get("taken", 0) + said.get("taken-on-kept", 0) >= taken else {}

        said = wait_for("the report of what was taken", told, self.server.alive)
        right = taken == BURST and not said.keys() & {"fill-failed", "agent-busy", "agent-silent"}
        return Outcome(f"{BURST} requests at once all take the state", right, f"{taken} of them; {said}")

    def stopped(self, tokens: list[int]) -> Outcome:
        note("vllm-server: stopping the agent")
        stream, agent = self.running(), self.host.agent.process
        agent.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        try:
            first = self.server.stream(tokens, 8).done()
            others = [self.server.stream(self.prompt(1000), 8) for _ in range(8)]
            after = self.server.stream(tokens, 8).done()
            rest = [other.done() for other in others]
            gap, later = stream.gap(begun), [at for at, _ in stream.came if at > begun]
        finally:
            agent.send_signal(signal.SIGCONT)
        stream.done()
        whole = all(len(one.tokens) == 8 for one in (first, after, *rest)) and len(stream.tokens) == LONG
        right = whole and bool(later) and gap < SLACK and first.first < PATIENCE + SLACK and after.first < SLACK + SLACK
        seen = (
            f"{len(later)} tokens of a running request meanwhile, none for at most {gap:.2f} s; first token of a request whose state lies "
        )
        seen += f"ready after {first.first:.2f} s, of the next after {after.first:.2f} s; all {2 + len(rest)} are computed"
        return Outcome("while the agent is stopped tokens go on, and requests are computed", right, seen)

    def back(self, tokens: list[int], boundary: int) -> Outcome:
        def silent() -> dict[str, int]:
            said = self.said()
            return said if said.get("agent-silent") else {}

        said = wait_for("the report of what was not asked", silent, self.server.alive)
        taken = self.server.stream(tokens, 8).done()
        right = taken.cached == boundary and len(taken.tokens) == 8
        return Outcome(
            "when it is back, it learns of that, and the next request takes the state", right, f"{said}, {taken.cached} tokens taken"
        )

    def stopped_in_a_pause(self) -> list[Outcome]:
        note("vllm-server: stopping the agent while it has the engine paused")
        stream, agent = self.running(), self.host.agent.process
        for attempt in range(10):
            failure: list[Stopped] = []
            capture = threading.Thread(target=self._capture, args=(f"{self.reference}:void-{attempt}", failure))
            capture.start()
            while capture.is_alive() and not self.server.paused():
                time.sleep(0.002)
            agent.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            try:
                # The call that ends the pause may have been under way.
                time.sleep(0.5)
                held = self.server.paused()
                if held:
                    wait_for("the engine to go on", lambda: not self.server.paused(), self.server.alive)
                    length = time.monotonic() - begun
                    stream.reach(len(stream.came) + 5)
            finally:
                agent.send_signal(signal.SIGCONT)
            capture.join()
            if held:
                break
            if not stream.is_alive():
                stream = self.running()
        else:
            raise Stopped("ten captures in a row ended before the agent was stopped")
        stream.done()
        void = str(failure[0]).splitlines()[-1] if failure else "it was captured"
        bound = length < PAUSE_LIMIT + SLACK and len(stream.tokens) == LONG
        return [
            Outcome("a pause ends by itself while the agent is stopped", bound, f"after {length:.1f} s; the limit is {PAUSE_LIMIT:.0f} s"),
            Outcome("and its capture is void", bool(failure), void[:160]),
        ]

    def _capture(self, reference: str, failure: list[Stopped]) -> None:
        try:
            self.host.pf("snapshot", ENGINE, reference, "--push", "never")
        except Stopped as error:
            failure.append(error)

    def killed(self) -> list[Outcome]:
        note("vllm-server: killing the agent")
        stream = self.running()
        self.host.kill()
        begun = time.monotonic()
        computed = self.server.stream(self.prompt(200), 8).done()
        stream.reach(len(stream.came) + 20)
        gap = stream.gap(begun)
        self.host.start()
        self.host.wait_ready(ENGINE, self.server)
        if not stream.is_alive():
            stream = self.running()
        report = self.host.pf("snapshot", ENGINE, f"{self.reference}:after", "--push", "never")
        whole = len(stream.done().tokens) == LONG and len(computed.tokens) == 8
        seen = f"none for at most {gap:.2f} s, first token of a new request after {computed.first:.2f} s"
        return [
            Outcome(
                "when the agent is killed tokens go on, and requests are computed", whole and gap < SLACK and computed.first < SLACK, seen
            ),
            Outcome("and the next agent captures", report["boundary"] > 0, f"T={report['boundary']}"),
        ]
