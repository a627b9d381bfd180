"""Save and resume by request: plain HTTP to a real server of SGLang on the CPU. The server is
killed; one on another host goes on.

SGLang's kernels for CPUs want AVX-512: here its own fallbacks in torch run
(`stand_ins/sgl_kernel`), with its real scheduler, tree, pools and server.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socketserver
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import processes
from outcome import Outcome
from processes import CONNECTORS, Child, Host, Registry, Stopped, engine_environment, fresh, note, wait_for
from vllm_check import write_model

ENGINE = "sglang-0"
PROMPT = 100
TURN = 60
"""Tokens of the first turn."""
MORE = 60
"""Tokens of a turn after it."""
LONG = 160
"""Tokens of a request that is captured while it runs."""
ROOM = 8192
"""Tokens that the engine has room for."""


class Server(Child):
    """A server of SGLang with the connector, in a session of its own."""

    def __init__(self, python: str, folder: Path, model: str, socket: Path, page: int, **settings: Any) -> None:
        """`settings` are the connector's."""
        folder.mkdir(parents=True, exist_ok=True)
        with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
            port = free.server_address[1]
        command = [python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", "m", "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--mem-fraction-static", "0.1", "--max-total-tokens", str(ROOM)]
        command += ["--context-length", "1024", "--page-size", str(page), "--skip-server-warmup", "--max-running-requests", "16"]
        env = engine_environment(folder)
        env["PYTHONPATH"] = os.pathsep.join([str(CONNECTORS / "checks" / "stand_ins"), str(_installed(folder)), env["PYTHONPATH"]])
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PF_SGLANG": json.dumps({"engine": ENGINE, "socket": str(socket), **settings})}
        super().__init__("sglang", command, folder / "server.log", env, start_new_session=True)
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        """Waits until it answers."""
        wait_for("the server", self._answers, self.alive)

    def _answers(self) -> bool:
        # SGLang's /health waits for a step while it starts.
        return "ready to roll" in self.log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A call of the server."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=processes.TIMEOUT) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise Stopped(f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from error
        found: dict[str, Any] = json.loads(text) if text.startswith("{") else {"text": text}
        return found

    def generate(self, prompt: list[int], count: int, *, salt: str | None = None, pf: dict[str, Any] | None = None) -> Tokens:
        """Exactly `count` tokens, greedily, with log-probabilities."""
        params: dict[str, Any] = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        params |= {"custom_params": {"pf": pf}} if pf else {}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True} | ({"cache_salt": salt} if salt else {})
        return Tokens(self.post("/generate", body))

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Tokens:
    """What an answer says of its tokens: ids, log-probabilities, and how many of the prompt were
    in the cache."""

    def __init__(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        self.ids: list[int] = answer["output_ids"]
        self.scores: list[float] = [entry[0] for entry in meta["output_token_logprobs"]]
        self.cached: int = meta["cached_tokens"]
        self.pf: dict[str, Any] = (meta.get("pf") or [{}])[0]


def _installed(folder: Path) -> Path:
    """What pip would install beside the package for SGLang to find the plugin."""
    points = tomllib.loads((CONNECTORS / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    place = folder / "installed" / "pf_connector-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: pf-connector\nVersion: 0\n")
    (place / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))
    return place.parent


def check(python: str, binaries: Path, folder: Path, page: int) -> list[Outcome]:
    """Runs a model through two turns on two hosts, with pages of `page` tokens."""
    fresh(folder)
    note(f"sglang, pages of {page}: writing a model with random weights")
    model = write_model(python, folder / "model", "dense")
    registry = Registry(binaries, folder / "registry")
    random.seed(7)
    prompt = [random.randrange(1, 500) for _ in range(PROMPT)]

    def on(name: str, run: Callable[[Host, Server], list[Outcome]]) -> list[Outcome]:
        host = Host(f"host {name}", binaries, folder / name, registry.url)
        server = None
        try:
            note(f"sglang, pages of {page}: starting a server on host {name}")
            server = Server(python, host.folder / "server", model, host.engines, page, keep=600, hold_limit=20)
            server.wait_ready()
            host.wait_ready(ENGINE, server)
            return run(host, server)
        finally:
            if server is not None:
                server.kill()
            host.stop()

    seen: dict[str, Any] = {"page": page}
    try:
        outcomes = on("a", lambda host, server: _first(host, server, prompt, seen))
        return outcomes + on("b", lambda host, server: _second(host, server, prompt, seen))
    finally:
        registry.stop()


def _floor(tokens: int, page: int) -> int:
    return tokens // page * page


def _first(host: Host, server: Server, prompt: list[int], seen: dict[str, Any]) -> list[Outcome]:
    page = seen["page"]
    note("a conversation without interruption, for comparison")
    seen["whole"] = whole = server.generate(prompt, TURN + MORE, salt="other")
    note("its first turn, saved by the request")
    turn = server.generate(prompt, TURN, pf={"save": "team/agent:turn-1", "name": "planner"})
    said = turn.pf.get("save", {})
    saved = host.saved(said["ticket"]) if "ticket" in said else {"state": said}
    # Tokens behind the last whole page are computed again, together: the bits are those of this
    # engine's own next turn.
    seen |= {"turn": turn, "saved": saved, "next": server.generate(prompt + turn.ids, MORE)}
    expected = _floor(PROMPT + TURN - 1, page)
    outcomes = [
        Outcome(
            "a request saves its state when it ends; its response tells the position, its ticket the digest",
            saved["state"] == "saved" and saved["boundary"] == said["position"] == expected and turn.ids == whole.ids[:TURN],
            f"position {said.get('position')}, {saved.get('digest', saved)}",
        ),
        _between(host, page),
        _openai(host, server, prompt),
        _running(host, server, [9, *prompt], seen),
        _hung(host, server, prompt),
        _flushed(host, server),
    ]
    host.wait_pushed()
    note("killing the server")
    server.kill()
    return outcomes


def _openai(host: Host, server: Server, prompt: list[int]) -> Outcome:
    """A client of the OpenAI API saves by the same field; the listing of saves is its answer."""
    wish = {"pf": {"save": "team/agent:openai", "name": "openai"}}
    server.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 20, "temperature": 0, "custom_params": wish})

    def saved() -> Any:
        return [
            one
            for one in host.pf("sequences", ENGINE).get("saves", [])
            if one["reference"].endswith(":openai") and one["state"] != "pending"
        ]

    found = wait_for("the save", saved, host.agent.alive)
    return Outcome("a request to the OpenAI API saves by `custom_params`", found[0]["state"] == "saved", str(found[0])[:200])


def _running(host: Host, server: Server, prompt: list[int], seen: dict[str, Any]) -> Outcome:
    """A capture in the middle of a generation: the engine is not paused, and its tokens are
    those of an undisturbed one."""
    page = seen["page"]
    whole = server.generate(prompt, LONG, salt="alone")
    with ThreadPoolExecutor() as pool:
        run = pool.submit(server.generate, prompt, LONG, salt="captured", pf={"name": "runs"})

        def generating() -> bool:
            found = host.pf("sequences", ENGINE)["sequences"]
            return any(one.get("name") == "runs" and one["boundary"] > PROMPT + 20 for one in found)

        wait_for("the generation", generating, server.alive)
        # The salt is part of the key: the request that resumes has it too.
        report = host.pf("snapshot", ENGINE, "team/agent:running", "--sequence", "runs")
        done = run.result()
    seen["running"] = prompt, whole, int(report["boundary"])
    same = done.ids == whole.ids and done.scores == whole.scores
    return Outcome(
        "a running request is captured by its name without a pause, and goes on bit for bit",
        same
        and report["pause_seconds"] == 0
        and report["moved_bytes"] > 0
        and PROMPT < report["boundary"] < PROMPT + LONG
        and report["boundary"] % page == 0,
        f"T={report['boundary']}, {report['moved_bytes']:,} bytes moved, paused {report['pause_seconds']} s",
    )


def _between(host: Host, page: int) -> Outcome:
    kept = [one for one in host.pf("sequences", ENGINE)["sequences"] if one["state"] == "ended"]
    report = host.pf("snapshot", ENGINE, "team/agent:between", "--sequence", "planner")
    return Outcome(
        "between turns a sequence is captured by the name of its request",
        report["boundary"] == _floor(PROMPT + TURN - 1, page),
        f"{len(kept)} kept, T={report['boundary']}",
    )


def _hung(host: Host, server: Server, prompt: list[int]) -> Outcome:
    """An agent that is stopped: requests go on."""
    note("an agent that is stopped while a request saves")
    os.kill(host.agent.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        done = server.generate([7, 8, 9, *prompt], 20, pf={"save": "team/agent:hung"})
        asked = server.generate([5, *prompt], 20, pf={"resume": "team/agent:turn-1"})
        took = time.monotonic() - begun
    finally:
        os.kill(host.agent.process.pid, signal.SIGCONT)
    saved = host.saved(done.pf["save"]["ticket"])
    return Outcome(
        "beside an agent that hangs requests go on, and one that wants to resume says why it did not",
        len(done.ids) == 20 and "reason" in asked.pf["resume"] and took < 30,
        f"{took:.1f} s, {asked.pf['resume'].get('reason')}; the save then: {saved['state']}",
    )


def _flushed(host: Host, server: Server) -> Outcome:
    """SGLang drops its cache: nothing that was kept is captured any more."""
    said = server.post("/flush_cache", {})
    left = [one for one in host.pf("sequences", ENGINE)["sequences"] if one["state"] == "ended"]
    try:
        refused = str(host.pf("snapshot", ENGINE, "team/agent:flushed", "--sequence", "planner"))
    except Stopped as error:
        refused = str(error).splitlines()[-1]
    return Outcome(
        "after SGLang has dropped its cache nothing of it is captured",
        "flushed" in str(said).lower() and not left and "sequence_unknown" in refused,
        refused[:200],
    )


def _second(host: Host, server: Server, prompt: list[int], seen: dict[str, Any]) -> list[Outcome]:
    whole, turn, saved, page = seen["whole"], seen["turn"], seen["saved"], seen["page"]
    history = prompt + turn.ids
    position = saved["boundary"]

    def exact(done: Tokens) -> bool:
        uninterrupted = (done.ids, done.scores) == (whole.ids[TURN:], whole.scores[TURN:])
        return (done.ids, done.scores) == (seen["next"].ids, seen["next"].scores) and (uninterrupted or page > 1)

    note("the second turn, in a fresh process on another host, after the engine there has computed the same tokens")
    server.generate(history, 2)
    wish = {"resume": "team/agent:turn-1", "save": "team/agent:turn-2"}
    done = server.generate(history, MORE, pf=wish)
    resumed = done.pf.get("resume", {})
    second = host.saved(done.pf["save"]["ticket"]) if "ticket" in done.pf.get("save", {}) else {}
    outcomes = [
        Outcome(
            "a request resumes from a snapshot of another host, and goes on bit for bit, although the engine has computed its tokens",
            exact(done)
            and done.cached == position
            and resumed == {"reference": wish["resume"], "position": position, "digest": saved["digest"]},
            f"{done.cached} of {len(history)} tokens taken, {resumed}",
        ),
        Outcome(
            "what it saves follows the snapshot that it resumed from",
            second.get("state") == "saved" and second["boundary"] == _floor(PROMPT + TURN + MORE - 1, page),
            str(second)[:200],
        ),
    ]
    before, undisturbed, at = seen["running"]
    count = at - len(before) + 1
    done = server.generate(before + undisturbed.ids[:count], LONG - count, salt="captured", pf={"resume": "team/agent:running"})
    same = (done.ids, done.scores) == (undisturbed.ids[count:], undisturbed.scores[count:])
    outcomes.append(
        Outcome(
            "what was captured in the middle of a generation goes on bit for bit on another host",
            same and done.cached == at and done.pf["resume"].get("position") == at,
            f"{done.cached} tokens taken, T={at}",
        )
    )
    note("forks at once")
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(server.generate, history, MORE, pf={"resume": "team/agent:turn-1"}) for _ in range(3)]
        forks = [run.result() for run in runs]
    outcomes.append(
        Outcome(
            "forks of one snapshot at once take its pages",
            all(fork.pf["resume"].get("position") == position and fork.cached >= position for fork in forks),
            f"{[fork.cached for fork in forks]} tokens taken; tokens as without interruption: {[exact(fork) for fork in forks]}",
        )
    )
    wrong = server.generate([3, *history], 5, pf={"resume": "team/agent:turn-1"})
    none = server.generate(history, 5, pf={"resume": "team/agent:no-such"})
    outcomes.append(
        Outcome(
            "a request with other tokens, or of no snapshot, is computed and says why",
            len(wrong.ids) == len(none.ids) == 5 and "reason" in wrong.pf["resume"] and "reason" in none.pf["resume"],
            f"{wrong.pf['resume'].get('reason')}; {none.pf['resume'].get('reason')}"[:300],
        )
    )
    note("a restore that the agent is told, for a request without a wish")
    server.post("/flush_cache", {})
    host.pf("restore", "team/agent:turn-1", ENGINE)
    plain = server.generate(history, MORE)
    outcomes.append(
        Outcome(
            "after `pf restore` the next request with its tokens takes it",
            exact(plain) and plain.cached == position,
            f"{plain.cached} taken",
        )
    )
    return outcomes
