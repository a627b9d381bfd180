"""Save and resume by request: plain HTTP to a real OpenAI server of vLLM. The server is killed; one
on another host goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outcome import Outcome
from processes import Host, Registry, Server, fresh, note, wait_for
from vllm_check import write_model

ENGINE = "vllm-0"
PROMPT = 100
TURN = 60
"""Tokens of the first turn; with the prompt it ends within a block."""
MORE = 100
"""Tokens of a turn after it."""
AT_ONCE = 8
FORKS = 12


class Tokens:
    """What a completion says of its tokens: their ids, their log-probabilities, and those that were
    taken as computed."""

    def __init__(self, answer: dict[str, Any]) -> None:
        (choice,) = answer["choices"]
        self.ids: list[int] = choice["token_ids"]
        self.scores: list[float] = choice["logprobs"]["token_logprobs"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        self.cached: int = details.get("cached_tokens") or 0
        self.pf: dict[str, Any] = (answer.get("kv_transfer_params") or {}).get("pf") or {}


def check(kind: str, python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs one model through two turns on two hosts."""
    fresh(folder)
    note(f"server, {kind}: writing a model with random weights")
    model = write_model(python, folder / "model", kind)
    args = ["--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", str(AT_ONCE), "--seed", "0"]
    args += ["--enable-prompt-tokens-details", "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
    args += ["--block-size", "32"] if kind == "dense" else []
    registry = Registry(binaries, folder / "registry")
    random.seed(7)
    prompt = [random.randrange(1, 500) for _ in range(PROMPT)]

    def on(name: str, run: Callable[[Host, Server], list[Outcome]]) -> list[Outcome]:
        host = Host(f"host {name}", binaries, folder / name, registry.url)
        server = None
        try:
            note(f"server, {kind}: starting an OpenAI server on host {name}")
            server = Server(python, host.folder / "server", model, ENGINE, host.engines, args, keep=60, hold_limit=20)
            server.wait_ready()
            host.wait_ready(ENGINE, server)
            return run(host, server)
        finally:
            if server is not None:
                server.kill()
            host.stop()

    seen: dict[str, Any] = {}
    try:
        outcomes = on("a", lambda host, server: _first(host, server, prompt, seen))
        return outcomes + on("b", lambda host, server: _second(host, server, prompt, seen))
    finally:
        registry.stop()


def _first(host: Host, server: Server, prompt: list[int], seen: dict[str, Any]) -> list[Outcome]:
    note("a conversation without interruption, for comparison")
    seen["whole"] = Tokens(server.complete(prompt, TURN + MORE, salt="other"))
    note("its first turn, saved by the request")
    turn = Tokens(server.complete(prompt, TURN, pf={"save": "team/agent:turn-1", "name": "planner"}))
    said = turn.pf.get("save", {})
    saved = host.saved(said["ticket"]) if "ticket" in said else {"state": said}
    seen |= {"turn": turn, "saved": saved}
    position = said.get("position")
    outcomes = [
        Outcome(
            "a request saves its state when it ends; its response tells the position, its ticket the digest",
            saved["state"] == "saved" and saved["boundary"] == position and position in (PROMPT + TURN - 1, PROMPT + TURN),
            f"position {position}, {saved.get('digest', saved)}",
        ),
        _running(host, server, prompt),
        *_between(host),
        *_at_once(host, server, seen),
        _hung(host, server),
    ]
    host.wait_pushed()
    note("killing the server")
    server.kill()
    return outcomes


def _running(host: Host, server: Server, prompt: list[int]) -> Outcome:
    """A capture in the middle of a generation: the engine is not paused, and its tokens are those
    of an undisturbed one."""
    with ThreadPoolExecutor() as pool:
        whole = Tokens(server.complete(prompt, 400, salt="alone"))
        run = pool.submit(server.complete, prompt, 400, salt="captured", pf={"name": "runs"})

        def generating() -> bool:
            found = host.pf("sequences", ENGINE)["sequences"]
            return any(one.get("name") == "runs" and one["boundary"] > PROMPT + 20 for one in found)

        wait_for("the generation", generating, server.alive)
        report = host.pf("snapshot", ENGINE, "team/agent:running", "--sequence", "runs")
        done = Tokens(run.result())
    same = done.ids == whole.ids and done.scores == whole.scores
    return Outcome(
        "a running request is captured by its name without a pause, and goes on bit for bit",
        same and report["pause_seconds"] == 0 and PROMPT < report["boundary"] < PROMPT + 400,
        f"T={report['boundary']}, {report['moved_bytes']:,} bytes moved, paused {report['pause_seconds']} s",
    )


def _between(host: Host) -> list[Outcome]:
    kept = [one for one in host.pf("sequences", ENGINE)["sequences"] if one["state"] == "ended"]
    report = host.pf("snapshot", ENGINE, "team/agent:between", "--sequence", "planner")
    return [
        Outcome(
            "between turns a sequence is captured by the name of its request",
            report["boundary"] in (PROMPT + TURN - 1, PROMPT + TURN),
            f"{len(kept)} kept, T={report['boundary']}",
        )
    ]


def _at_once(host: Host, server: Server, seen: dict[str, Any]) -> list[Outcome]:
    note(f"{AT_ONCE} requests at once, each saved")
    prompts = [[random.randrange(1, 500) for _ in range(40 + number)] for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(server.complete, one, 30, pf={"save": f"team/agent:many-{number}"}) for number, one in enumerate(prompts)]
        done = [Tokens(run.result()) for run in runs]
    told = [one.pf.get("save", {}) for one in done]
    saved = [host.saved(said["ticket"]) if "ticket" in said else said for said in told]
    seen["many"] = [([*prompt, *one.ids], state) for prompt, one, state in zip(prompts, done, saved, strict=True)]
    states = [one.get("state") for one in saved]
    digests = {one.get("digest") for one in saved}
    return [Outcome(f"{AT_ONCE} requests at once are all saved", states == ["saved"] * AT_ONCE and len(digests) == AT_ONCE, str(states))]


def _resumed_at_once(server: Server, seen: dict[str, Any]) -> Outcome:
    """Each of them goes on from its own state, while the others do."""
    note(f"{AT_ONCE} requests at once, each resumed")
    many = seen["many"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [
            pool.submit(server.complete, [*tokens, 3], 20, pf={"resume": f"team/agent:many-{at}"}) for at, (tokens, _) in enumerate(many)
        ]
        done = [Tokens(run.result()) for run in runs]
    taken = [
        "digest" in saved and one.pf.get("resume", {}).get("digest") == saved["digest"] and one.cached == saved["boundary"]
        for one, (_, saved) in zip(done, many, strict=True)
    ]
    known = str([one.pf.get("resume") for one in done])
    return Outcome(
        f"{AT_ONCE} requests at once each resume from their own state", taken == [True] * AT_ONCE, f"{sum(taken)} of them; {known[:300]}"
    )


def _hung(host: Host, server: Server) -> Outcome:
    """An agent that is stopped: requests go on, blocks come back, and the save that it wakes up
    with is void or whole."""
    note("an agent that is stopped while requests save")
    os.kill(host.agent.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        said = [Tokens(server.complete([7, 8, 9, number], 20, pf={"save": f"team/agent:hung-{number}"})).pf["save"] for number in range(3)]
        took = time.monotonic() - begun
    finally:
        os.kill(host.agent.process.pid, signal.SIGCONT)
    again = Tokens(server.complete([7, 8, 9, 10], 20, pf={"save": "team/agent:awake"})).pf["save"]
    saved = host.saved(again["ticket"]) if "ticket" in again else again
    right = all("ticket" in one for one in said) and took < 30 and saved["state"] == "saved"
    return Outcome(
        "an agent that hangs costs requests that save a bounded time, and saves again when it is back",
        right,
        f"{took:.1f} s, {saved['state']}",
    )


def _second(host: Host, server: Server, prompt: list[int], seen: dict[str, Any]) -> list[Outcome]:
    turn, saved, whole = seen["turn"], seen["saved"], seen["whole"]
    tokens = prompt + turn.ids
    resume = {"resume": "team/agent:turn-1"}
    note("the same conversation on another host, resumed by the request")
    done = Tokens(server.complete(tokens, MORE, pf={**resume, "save": "team/agent:turn-2"}))
    said = done.pf.get("resume", {})
    taken = said.get("digest") == saved.get("digest") and said.get("position") == saved.get("boundary") == done.cached
    same = done.ids == whole.ids[TURN:] and done.scores == whole.scores[TURN:]
    outcomes = [
        Outcome(
            "after kill -9 a request on another host resumes from what it names", taken, f"{said}, {done.cached} tokens taken as computed"
        ),
        Outcome("and has the tokens and log-probabilities of the uninterrupted conversation, bit for bit", same, f"{len(done.ids)} tokens"),
    ]
    forks = [Tokens(server.complete(tokens, MORE, pf=resume)) for _ in range(FORKS)]
    exact = sum(fork.ids == whole.ids[TURN:] and fork.scores == whole.scores[TURN:] for fork in forks)
    told = sum(fork.pf.get("resume") == said and fork.cached == said.get("position") for fork in forks)
    outcomes.append(
        Outcome(
            f"{FORKS} forks by request are each exact, and each response says that it took the state",
            exact == told == FORKS,
            f"{exact} exact, {told} took it; the last: {forks[-1].pf.get('resume')}",
        )
    )
    outcomes.append(_resumed_at_once(server, seen))
    other = [Tokens(server.complete([*tokens, 400 + number], 20, pf=resume)) for number in range(3)]
    # vLLM's own cache may have a block more than the snapshot by now: then it says so, and resumes
    # from that.
    known = [(fork.pf["resume"].get("digest") or fork.pf["resume"].get("reason"), fork.cached) for fork in other]
    begun = all(which in (saved.get("digest"), "engine-has-more") and cached >= said.get("position", 1) for which, cached in known)
    outcomes.append(Outcome("and so begin three that go other ways", begun, str(known)))
    second = host.saved(done.pf["save"]["ticket"]) if "ticket" in done.pf.get("save", {}) else {"state": done.pf}
    back = Tokens(server.complete(tokens + done.ids + [3], 10, pf={"resume": "team/agent:turn-2"})).pf["resume"]
    outcomes.append(
        Outcome("the next turn was saved too, and is found at once", "digest" in back and back["digest"] == second.get("digest"), str(back))
    )
    wrong = Tokens(server.complete(prompt, 5, pf={"resume": "team/agent:never", "save": "team/agent@2a19b2c9309a"}))
    reason = wrong.pf["resume"].get("reason", "")
    outcomes.append(
        Outcome("what cannot be resumed is said in the response, and computed", "tag_unknown" in reason and len(wrong.ids) == 5, reason)
    )
    misspelt = Tokens(server.complete(prompt, 5, pf={"resum": "team/agent:turn-1"}))
    outcomes.append(Outcome("a wish that makes no sense is named", "resum" in misspelt.pf.get("error", ""), str(misspelt.pf)))
    return outcomes
