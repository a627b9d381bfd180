"""Checks that a real vLLM server goes on serving, with bounded delays, while its agent is stopped
and after its agent was killed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from outcome import Outcome
from processes import Host, Registry, Server, fresh, note, wait_for
from streams import Stream
from vllm_check import write_model

ENGINE = "vllm-0"
ANSWER_LIMIT = 1.0
"""The connector's default: seconds that a request waits for an answer."""
SLACK = 3.0
"""Seconds that this machine may take for a step, or the first token of a prompt, beside other
work."""
LONG = 1900
"""Tokens of the answer to a request that must still run when a check ends."""
BURST = 64
"""Number of requests that are sent at once. The agent lets one member have half as many open
calls."""


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs the check with one server on one host, with one agent after another."""
    fresh(folder)
    model = write_model(python, folder / "model", "dense")
    registry = Registry(binaries, folder / "registry")
    host = Host("host A", binaries, folder / "a", registry.url)
    note("vllm-hung: starting an OpenAI server")
    args = ["--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "72"]
    args += ["--block-size", "32", "--seed", "0", "--enable-prompt-tokens-details"]
    server = Server(python, folder / "server", model, ENGINE, host.engines, args)
    try:
        server.wait_ready()
        host.wait_ready(ENGINE, server)
        return _Check(server, host, f"{registry.url}/real/server").run()
    finally:
        for child in (server, host, registry):
            child.stop()


class _Check:
    def __init__(self, server: Server, host: Host, reference: str) -> None:
        self.server, self.host, self.reference = server, host, reference
        self.random = random.Random(7)

    def prompt(self, count: int) -> list[int]:
        return [self.random.randrange(1, 500) for _ in range(count)]

    def running(self) -> Stream:
        """A request that runs for a while."""
        stream = Stream(self.server, self.prompt(20), LONG)
        stream.reach(5)
        return stream

    def run(self) -> list[Outcome]:
        note("vllm-hung: capturing a request, and keeping it ready")
        captured = Stream(self.server, prompt := self.prompt(100), 300)
        captured.reach(20)
        report = self.host.pf("snapshot", ENGINE, f"{self.reference}:mid", "--push", "wait")
        boundary = report["boundary"]
        tokens = (prompt + captured.done().tokens)[: boundary + 1]
        self.host.pf("restore", f"{self.reference}:mid", ENGINE)
        outcomes = [self.burst(tokens, boundary), self.stopped(tokens), self.continued(tokens, boundary)]
        return [*outcomes, *self.killed()]

    def said(self) -> dict[str, int]:
        """The outcomes of requests and their numbers, as the agent lists them."""
        info = self.host.engine(ENGINE) or {}
        said = dict(info.get("outcomes") or {})
        for ready in info.get("staged") or ():
            for what, count in ready["outcomes"].items():
                said[what] = said.get(what, 0) + count
        return said

    def burst(self, tokens: list[int], boundary: int) -> Outcome:
        note(f"vllm-hung: {BURST} requests at once")
        done = [stream.done() for stream in [Stream(self.server, tokens, 8) for _ in range(BURST)]]
        taken = sum(one.cached == boundary and len(one.tokens) == 8 for one in done)

        def told() -> dict[str, int]:
            said = self.said()
            return said if said.get("taken", 0) + said.get("taken-on-kept", 0) >= taken else {}

        said = wait_for("the report of the requests that took the state", told, self.server.alive)
        right = taken == BURST and not said.keys() & {"fill-failed", "agent-busy", "agent-silent"}
        return Outcome(f"{BURST} requests at once all take the state", right, f"{taken} of them; {said}")

    def stopped(self, tokens: list[int]) -> Outcome:
        note("vllm-hung: stopping the agent")
        stream, agent = self.running(), self.host.agent.process
        agent.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        try:
            first = Stream(self.server, tokens, 8).done()
            others = [Stream(self.server, self.prompt(1000), 8) for _ in range(8)]
            after = Stream(self.server, tokens, 8).done()
            rest = [other.done() for other in others]
            gap, later = stream.gap(begun), [at for at, _ in stream.came if at > begun]
        finally:
            agent.send_signal(signal.SIGCONT)
        stream.done()
        complete = all(len(one.tokens) == 8 for one in (first, after, *rest)) and len(stream.tokens) == LONG
        right = complete and bool(later) and gap < SLACK and first.first < ANSWER_LIMIT + SLACK and after.first < SLACK + SLACK
        seen = (
            f"{len(later)} tokens of a running request meanwhile, the longest gap is {gap:.2f} s; first token of a request whose state is "
        )
        seen += f"ready after {first.first:.2f} s, of the next request after {after.first:.2f} s; all {2 + len(rest)} requests are computed"
        return Outcome("while the agent is stopped, running requests get tokens and new requests are computed", right, seen)

    def continued(self, tokens: list[int], boundary: int) -> Outcome:
        """Checks the agent that was stopped and continues."""

        def silent() -> dict[str, int]:
            said = self.said()
            return said if said.get("agent-silent") else {}

        said = wait_for("the report of the requests for which the agent was silent", silent, self.server.alive)
        taken = Stream(self.server, tokens, 8).done()
        right = taken.cached == boundary and len(taken.tokens) == 8
        return Outcome(
            "when the agent continues, it gets the outcomes of these requests, and the next request takes the state",
            right,
            f"{said}, {taken.cached} tokens taken",
        )

    def killed(self) -> list[Outcome]:
        note("vllm-hung: killing the agent")
        stream = self.running()
        self.host.kill()
        begun = time.monotonic()
        computed = Stream(self.server, self.prompt(200), 8).done()
        stream.reach(len(stream.came) + 20)
        gap = stream.gap(begun)
        self.host.start()
        self.host.wait_ready(ENGINE, self.server)
        if not stream.is_alive():
            stream = self.running()
        report = self.host.pf("snapshot", ENGINE, f"{self.reference}:after", "--push", "never")
        complete = len(stream.done().tokens) == LONG and len(computed.tokens) == 8
        seen = f"the longest gap is {gap:.2f} s, first token of a new request after {computed.first:.2f} s"
        return [
            Outcome(
                "after the agent is killed, running requests get tokens and new requests are computed",
                complete and gap < SLACK and computed.first < SLACK,
                seen,
            ),
            Outcome("the next agent captures the engine", report["boundary"] > 0, f"T={report['boundary']}"),
        ]
