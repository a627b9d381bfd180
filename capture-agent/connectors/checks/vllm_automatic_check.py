"""Checks the automatic mode with a real OpenAI server of vLLM: the connector saves and resumes
turns although no request mentions snapshots. The server is killed. On another host the next turns
resume from the snapshots in the registry, each at the deepest position that its tokens allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outcome import Outcome
from processes import PROCESSORS, Host, Registry, Server, fresh, note, wait_for
from vllm_check import write_model
from vllm_server_check import Tokens

ENGINE = "vllm-0"
BLOCK = 32
ANSWER = 60
"""Tokens of each answer. With `SAID` it is no multiple of `BLOCK`, so turns end within a block."""
SAID = 45
"""Tokens that the user says in each turn."""
USERS = ("alice", "bob")
LEAST = 16
"""The setting `least`: shorter turns are not saved, and a state is not used if it saves a request
fewer tokens than this."""


class Conversation:
    """The tokens of a conversation so far, and the answers of an engine without connector, which
    computes all tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.tokens: list[int] = []
        self.answers: list[Tokens] = []

    def says(self) -> list[int]:
        """Adds the user's next tokens. Returns the prompt."""
        self.tokens += [self._random.randrange(1, 500) for _ in range(SAID)]
        return list(self.tokens)

    def hears(self, answer: Tokens) -> None:
        """Adds an answer of the engine."""
        self.answers.append(answer)
        self.tokens += answer.ids


class Automatic:
    """A registry, and hosts and servers in automatic mode, one after another."""

    def __init__(self, python: str, binaries: Path, folder: Path, kind: str, args: list[str]) -> None:
        """`kind` is the model, `args` are further options of the servers."""
        fresh(folder)
        self.python, self.binaries, self.folder = python, binaries, folder
        self.registry = Registry(binaries, folder / "registry")
        note(f"automatic: writing a {kind} model with random weights")
        self.model = write_model(python, folder / "model", kind)
        self.args = ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8", "--seed", "0"]
        self.args += ["--enable-prompt-tokens-details", "--enable-prefix-caching", *args]

    @contextmanager
    def server(self, host: Host, name: str, engine: str | None = ENGINE, **auto: Any) -> Iterator[Server]:
        """An OpenAI server; `auto` are settings of its automatic mode."""
        settings: dict[str, Any] = {"repository": "agents/{user}", "least": LEAST, "match_limit": 60, **auto}
        note(f"automatic: starting an OpenAI server, {name}")
        server = Server(self.python, self.folder / name, self.model, engine, host.engines, self.args, PROCESSORS, auto=settings)
        try:
            server.wait_ready()
            if engine is not None:
                host.wait_ready(engine, server)
            yield server
        finally:
            server.kill()

    @contextmanager
    def host(self, name: str) -> Iterator[Host]:
        """A host with an agent."""
        host = Host(f"host {name}", self.binaries, self.folder / name, self.registry.url)
        try:
            yield host
        finally:
            host.stop()

    def saved(self, host: Host, count: int) -> list[dict[str, Any]]:
        """Waits until there are `count` saves and all have ended. Returns the saves."""

        def look() -> list[dict[str, Any]] | None:
            saves: list[dict[str, Any]] = host.pf("sequences", ENGINE)["saves"]
            return saves if len(saves) >= count and all(one["state"] != "pending" for one in saves) else None

        found: list[dict[str, Any]] = wait_for(f"{count} saves", look, host.agent.alive)
        return found

    def counts(self, host: Host, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """The outcomes of requests and saves in the agent's metrics, as soon as `holds` accepts
        them, or after a hundred tries."""
        seen: dict[str, int] = {}
        tries = iter(range(100))

        def look() -> bool:
            seen.clear()
            seen.update(takings(host))
            return holds(seen) or next(tries, None) is None

        wait_for("the metrics", look, host.agent.alive)
        return seen


class _Check(Automatic):
    def __init__(self, python: str, binaries: Path, folder: Path) -> None:
        # The model computes in float32. With 16 bits, the same tokens in another batch may be
        # rounded so differently that the engine chooses another token.
        super().__init__(python, binaries, folder, "dense", ["--dtype", "float32", "--block-size", str(BLOCK)])
        self.prompts: dict[str, list[list[int]]] = {user: [] for user in USERS}
        self.expected: dict[str, list[Tokens]] = {}
        self.ends: dict[str, int] = {}
        """Where the last save of each user ends."""

    def run(self) -> list[Outcome]:
        with self.host("a") as host:
            with self.server(host, "plain", engine=None) as server:
                self.compute(server)
            with self.server(host, "a1") as server:
                outcomes = self.first(host, server)
        with self.host("b") as host:
            with self.server(host, "b1") as server:
                outcomes += self.second(host, server)
            with self.server(host, "b2", bytes_per_second=1000) as server:
                outcomes += self.third(host, server)
        return outcomes

    def compute(self, server: Server) -> None:
        """Computes four turns of each conversation. Each request has a salt of its own, so the
        engine takes nothing from its cache. Bob's third turn continues from within the second
        answer."""
        note("automatic: the same turns with all tokens computed, for comparison")
        for number, user in enumerate(USERS):
            conversation = Conversation(number)
            for turn in range(4):
                prompt = conversation.says()
                if (user, turn) == ("bob", 2):
                    # Leave out the last 25 tokens of the second answer.
                    prompt = [*prompt[: len(prompt) - SAID - 25], *prompt[-SAID:]]
                    conversation.tokens = list(prompt)
                self.prompts[user].append(prompt)
                conversation.hears(Tokens(server.complete(prompt, ANSWER, salt=f"{user}-{turn}")))
            self.expected[user] = conversation.answers

    def turn(self, server: Server, user: str, turn: int) -> tuple[Tokens, str, bool]:
        """Runs a turn. Returns the answer, a text that compares it with the computed answer, and
        whether both have the same tokens."""
        found = Tokens(server.complete(self.prompts[user][turn], ANSWER, pf={"user": user}))
        expected = self.expected[user][turn]
        far = max(abs(one - other) for one, other in zip(found.scores, expected.scores, strict=True))
        seen = f"{user}'s turn {turn + 1}: {found.cached} of {len(self.prompts[user][turn])} tokens taken"
        seen += f", log-probabilities differ by {far:.2g}"
        return found, seen, found.ids == expected.ids

    def first(self, host: Host, server: Server) -> list[Outcome]:
        note("automatic: two turns of two conversations on host a")
        turns = [self.turn(server, user, turn) for turn in range(2) for user in USERS]
        saves = self.saved(host, 4)
        for user in USERS:
            self.ends[user] = max((one.get("boundary") or 0 for one in saves if f"agents/{user}:" in one["reference"]), default=0)
        host.wait_pushed()
        repositories = sorted({one["reference"].split(":auto-")[0] for one in saves})
        note("automatic: killing the server")
        return [
            Outcome(
                "every turn is saved in its user's repository, and pushed",
                [one["state"] for one in saves] == ["saved"] * 4
                and [one.rsplit("/", 2)[-2:] for one in repositories] == [["agents", "alice"], ["agents", "bob"]],
                f"{len(saves)} saves in {', '.join(repositories)}; the last end at {self.ends}",
            ),
            Outcome(
                "the answers are those of an engine that computed everything",
                all(same for _, _, same in turns),
                "; ".join(seen for _, seen, _ in turns),
            ),
        ]

    def second(self, host: Host, server: Server) -> list[Outcome]:
        note("automatic: the third turns on host b, which has nothing")
        alice, seen_alice, same_alice = self.turn(server, "alice", 2)
        bob, seen_bob, same_bob = self.turn(server, "bob", 2)
        # Bob's third turn differs from his second one from a token of the answer on.
        differs = len(self.prompts["bob"][2]) - SAID
        deepest = differs // BLOCK * BLOCK
        again, seen_again, same_again = self.turn(server, "bob", 2)
        said = self.counts(
            host,
            lambda seen: (
                seen.get("hit-registry", 0) >= 2 and seen.get("hit-engine", 0) + seen.get("hit-memory", 0) + seen.get("hit-store", 0) >= 1
            ),
        )
        self.saved(host, 3)
        return [
            Outcome(
                "after kill -9 a turn on another host resumes from the end of the one before",
                alice.cached == self.ends["alice"],
                seen_alice,
            ),
            Outcome(
                "a turn that differs from a token of an answer on resumes from the last full page before that token",
                bob.cached == deepest,
                f"{seen_bob}; it differs from token {differs} on, pages have {BLOCK} tokens",
            ),
            Outcome(
                "both answers are those of an engine that computed everything",
                same_alice and same_bob and same_again,
                f"{seen_alice}; {seen_bob}; {seen_again}",
            ),
            Outcome("the metrics have the tier of each hit", said.get("hit-registry") == 2, str(said)),
        ]

    def third(self, host: Host, server: Server) -> list[Outcome]:
        note("automatic: a new server beside the same agent, with a small budget")
        before = takings(host)
        known = len(host.pf("sequences", ENGINE)["saves"])
        turns = [self.turn(server, "alice", 3)]
        # The agent counts a save's bytes against the budget when the save has ended.
        self.saved(host, known + 1)
        turns.append(self.turn(server, "bob", 3))

        def more(seen: dict[str, int]) -> dict[str, int]:
            return {what: count - before.get(what, 0) for what, count in seen.items() if count > before.get(what, 0)}

        wanted = ("hit-store", "save-dropped-budget")
        said = more(self.counts(host, lambda seen: more(seen).get(wanted[0], 0) >= 2 and more(seen).get(wanted[1], 0) >= 1))
        saves = host.pf("sequences", ENGINE)["saves"]
        return [
            Outcome(
                "beside the same agent a new server resumes from the agent's store",
                said.get("hit-store") == 2 and all(found.cached > 0 and same for found, _, same in turns),
                "; ".join(seen for _, seen, _ in turns) + f"; {said}",
            ),
            Outcome(
                "when the budget is used up, saves are dropped, and the metrics say so",
                said.get("save-dropped-budget", 0) >= 1,
                f"{said}; saves: {[(one['reference'], one['state']) for one in saves]}",
            ),
        ]


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs the check on two hosts, one after the other."""
    check = _Check(python, binaries, folder)
    try:
        return check.run()
    finally:
        check.registry.stop()


def takings(host: Host) -> dict[str, int]:
    """What became of requests and of turns."""
    return host.counts("pf_agent_takings_total", "what")
