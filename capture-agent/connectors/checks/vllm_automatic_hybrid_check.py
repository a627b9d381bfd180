"""Checks the automatic mode with a hybrid model. Its recurrent state is a checkpoint at one token
position, so a turn resumes only where another one ended: from the longest such turn that it
continues.

The model computes in bfloat16, and rounds tokens that come at once otherwise than tokens that come
one after another. So most turns here go on with what the engine without connector has said itself,
and must equal that bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

from outcome import REPLAY, Outcome
from processes import Host, Server, note
from vllm_automatic_check import ANSWER, SAID, Automatic
from vllm_server_check import Tokens

PROMPTS = {"alice": 100, "bob": 500}
"""Tokens of the first turns. A block of this model has 256 or 384, as vLLM chooses it."""
TURNS = 3
PARTS = 25
"""Tokens of the second answer that a turn of bob's has before it goes another way."""
NEAR = 0.05
"""Largest difference of the first log-probability, where the tokens before it came at once."""


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs the check on two hosts, one after the other."""
    check = _Check(python, binaries, folder)
    try:
        return check.run()
    finally:
        check.registry.stop()


class _Check(Automatic):
    def __init__(self, python: str, binaries: Path, folder: Path) -> None:
        super().__init__(python, binaries, folder, "hybrid", ["--dtype", "bfloat16"])
        words = random.Random(7)
        self.prompts = {user: [words.randrange(1, 500) for _ in range(count)] for user, count in PROMPTS.items()}
        self.said = [words.randrange(1, 500) for _ in range(SAID)]
        self.whole: dict[str, Tokens] = {}
        """What each prompt becomes without connector and without an interruption."""
        self.other: dict[str, Tokens] = {}
        """And what becomes of turns that go another way, with all tokens computed."""
        self.ends: dict[str, list[int]] = {}
        """Where the saved turns of each user end."""

    def run(self) -> list[Outcome]:
        with self.host("a") as host:
            with self.server(host, "plain", engine=None) as server:
                self.compute(server)
            with self.server(host, "a1") as server:
                outcomes = self.first(host, server)
        with self.host("b") as host, self.server(host, "b1") as server:
            return outcomes + self.second(host, server)

    def prompt(self, user: str, turn: int) -> list[int]:
        """The tokens of a turn that goes on with what was said."""
        return self.prompts[user] + self.whole[user].ids[: turn * ANSWER]

    def ways(self) -> dict[str, list[int]]:
        """Turns of bob's that go another way: within the prompt of the first, within the answer of
        the second, and after the second."""
        first, second, third = (self.prompt("bob", turn) for turn in range(TURNS))
        return {
            "within the first prompt": [*first[:-PARTS], *self.said],
            "within the second answer": [*second, *third[len(second) :][:PARTS], *self.said],
            "after the second": [*third, *self.said],
        }

    def compute(self, server: Server) -> None:
        note("automatic: the same without connector, for comparison")
        for user, prompt in self.prompts.items():
            self.whole[user] = Tokens(server.complete(prompt, TURNS * ANSWER, salt=user))
        for way, prompt in self.ways().items():
            self.other[way] = Tokens(server.complete(prompt, ANSWER, salt=way))

    def turn(self, server: Server, user: str, turn: int) -> tuple[Tokens, str, bool]:
        """Runs a turn that goes on. Returns the answer, a text, and whether it is the one without
        connector, bit for bit."""
        prompt, part = self.prompt(user, turn), slice(turn * ANSWER, (turn + 1) * ANSWER)
        found, expected = Tokens(server.complete(prompt, ANSWER, pf={"user": user})), self.whole[user]
        equal = sum(one == other for one, other in zip(found.ids, expected.ids[part], strict=True))
        bits = found.scores == expected.scores[part]
        seen = f"{user}'s turn {turn + 1}: {found.cached} of {len(prompt)} tokens taken, {equal} of {ANSWER} tokens equal"
        return found, f"{seen}{', bit for bit' if bits else ''}", equal == ANSWER and bits

    def first(self, host: Host, server: Server) -> list[Outcome]:
        note("automatic: two turns of two conversations on host a")
        turns = [self.turn(server, user, 0) for user in PROMPTS]
        self.saved(host, 2)
        turns += [self.turn(server, user, 1) for user in PROMPTS]
        saves = self.saved(host, 4)
        for user in PROMPTS:
            self.ends[user] = sorted(one.get("boundary") or 0 for one in saves if f"agents/{user}:" in one["reference"])
        host.wait_pushed()
        # The last token is chosen and not computed.
        expected = {user: [len(self.prompt(user, turn)) - 1 for turn in (1, 2)] for user in PROMPTS}
        resumed = [found.cached for found, _, _ in turns[2:]]
        said = self.counts(host, lambda seen: hits(seen) >= 2)
        note("automatic: killing the server")
        return [
            Outcome(
                "hybrid: every turn is saved, each as a checkpoint where it ends",
                [one["state"] for one in saves] == ["saved"] * 4 and self.ends == expected,
                f"{len(saves)} saves, {[one['state'] for one in saves]}; they end at {self.ends}",
            ),
            Outcome(
                "hybrid: a second turn resumes from the end of the first",
                resumed == [self.ends[user][0] for user in PROMPTS],
                f"{resumed} tokens taken; {said}",
            ),
            Outcome(
                "hybrid: the answers are those without connector, bit for bit",
                all(same for _, _, same in turns),
                "; ".join(seen for _, seen, _ in turns),
            ),
        ]

    def second(self, host: Host, server: Server) -> list[Outcome]:
        note("automatic: turns on host b, which has nothing")
        ways = self.ways()
        where = dict(zip(ways, (0, *self.ends["bob"]), strict=True))
        others = {way: self.go(server, prompt) for way, prompt in ways.items()}
        misses = self.counts(host, lambda seen: seen.get("miss", 0) >= 1 and hits(seen) >= 2)
        turns = [self.turn(server, user, TURNS - 1) for user in PROMPTS]
        again = self.go(server, ways["within the second answer"])
        said = self.counts(host, lambda seen: hits(seen) >= 5)
        taken = {way: found.cached for way, found in others.items()}
        first = {way: (found.ids[0], found.scores[0]) for way, found in others.items()}
        far = {way: abs(first[way][1] - self.other[way].scores[0]) for way in ways}
        equal = {way: same(found.ids, self.other[way].ids) for way, found in others.items()}
        near = all(first[way][0] == self.other[way].ids[0] and far[way] <= NEAR for way in ways)
        once = others["within the second answer"]
        return [
            Outcome(
                "hybrid: after kill -9 a turn on another host resumes from the end of the one before, and goes on bit for bit",
                [found.cached for found, _, _ in turns] == [self.ends[user][-1] for user in PROMPTS] and all(same for _, _, same in turns),
                "; ".join(seen for _, seen, _ in turns),
            ),
            Outcome(
                "hybrid: a turn that goes another way resumes from the deepest checkpoint before that, if there is one",
                taken == where,
                "; ".join(f"{way}: {count} of {len(ways[way])} tokens taken" for way, count in taken.items()),
            ),
            Outcome(
                "hybrid: these answers begin as those of an engine that computed everything",
                near,
                "; ".join(f"{way}: {equal[way]} of {ANSWER} tokens, the first log-probability differs by {far[way]:.2g}" for way in ways),
            ),
            Outcome(
                f"{REPLAY}: such a turn once more has the same log-probabilities, bit for bit",
                again.cached == once.cached and again.scores == once.scores,
                f"{again.cached} tokens taken",
            ),
            Outcome(
                "hybrid: the metrics say which requests resumed, from where, and which did not",
                misses.get("miss") == 1 and said.get("miss") == 1 and hits(said) == 5 and said.get("hit-registry", 0) >= 3,
                f"{said}",
            ),
        ]

    def go(self, server: Server, prompt: list[int]) -> Tokens:
        """A turn of bob's that goes another way."""
        return Tokens(server.complete(prompt, ANSWER, pf={"user": "bob"}))


def hits(seen: dict[str, int]) -> int:
    """Requests that resumed from a state."""
    return sum(seen.get(what, 0) for what in ("hit-memory", "hit-store", "hit-registry"))


def same(ones: list[int], others: list[int]) -> int:
    """Tokens until the first that differs."""
    pairs = enumerate(zip(ones, others, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(ones))
