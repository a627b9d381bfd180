"""Captures slots of a real `llama-server` on one host, and restores them on another.

The server is unmodified, and has no connector: agents speak to it over HTTP and through its files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

from llama_models import write
from outcome import Outcome
from processes import Child, Host, Registry, Stopped, fresh, note, wait_for

ENGINE = "llama-0"
PROMPT = 2000
CONTEXT = 4096
SLOTS = 2
FORK_SHARE = 0.15
"""Part of a session that a fork may store again."""


class Server(Child):
    """A `llama-server` on a free port, with a folder for its slots."""

    def __init__(self, binary: str, model: str, folder: Path, *args: str) -> None:
        self.slots = fresh(folder / "slots")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [binary, "-m", model, "-c", str(CONTEXT * SLOTS), "--parallel", str(SLOTS), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--slot-save-path", str(self.slots), "--no-webui", *args]
        super().__init__("llama-server", command, folder / "server.log", dict(os.environ))
        wait_for("llama-server", self._healthy, self.alive)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """One request."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def complete(self, slot: int, tokens: list[int], count: int) -> dict[str, Any]:
        """Continues tokens in a slot, always with the most likely one."""
        return self.ask(
            "/completion",
            prompt=tokens,
            n_predict=count,
            id_slot=slot,
            temperature=0,
            cache_prompt=True,
            return_tokens=True,
            ignore_eos=True,
        )

    def setting(self) -> list[str]:
        """The option of an agent that captures it."""
        return ["--llama", f"name={ENGINE},url={self.url},slot-save-path={self.slots}", "--engine-timeout", "5"]

    def stop(self) -> None:
        """Ends the process, also a stopped one."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        super().stop()


def check(binary: str, model: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs a dense model through capture and restore, with flash attention and without, and tiny
    models of other kinds."""
    fresh(folder)
    registry = Registry(binaries, folder / "registry")
    try:
        outcomes = _sessions(binary, model, binaries, folder / "fa", registry)
        outcomes += _sessions(binary, model, binaries, folder / "no-fa", registry, "-fa", "off")
        for kind in ("windows", "recurrent", "hybrid"):
            tiny = folder / f"{kind}.gguf"
            write(kind, Path(model), tiny)
            outcomes.append(_tiny(kind, binary, str(tiny), binaries, folder / kind, registry))
        return outcomes
    finally:
        registry.stop()


def _sessions(binary: str, model: str, binaries: Path, folder: Path, registry: Registry, *args: str) -> list[Outcome]:
    kind = " ".join(args) or "default options"
    note(f"llama: starting llama-server on host A, {kind}")
    reference = f"{registry.url}/real/llama-{folder.name}"
    a = Server(binary, model, _made(folder / "server-a"), *args)
    host_a = Host("host A", binaries, folder / "a", registry.url, *a.setting())
    try:
        host_a.wait_ready(ENGINE, a)
        words = "The agent wrote down, one after another, each thing that it had seen on its way: "
        prompt = (a.ask("/tokenize", content=words * 200)["tokens"])[:PROMPT]
        first = prompt + a.complete(0, prompt, 32)["tokens"]
        report = host_a.pf("snapshot", ENGINE, f"{reference}:one", "--sequence", "0", "--push", "wait")
        again = [*first, *a.ask("/tokenize", content=" And then")["tokens"]]
        uninterrupted = a.complete(0, again, 64)
        outcomes = [_fork(host_a, a, reference, first, report, kind)]
        if not args:
            outcomes.append(_hangs(host_a, a, reference))
        outcomes.append(Outcome(f"no file stays with the first server ({kind})", not list(a.slots.iterdir()), str(a.slots)))
    finally:
        a.stop()
        host_a.stop()
    note(f"llama: starting a fresh llama-server on host B, {kind}")
    b = Server(binary, model, _made(folder / "server-b"), *args)
    host_b = Host("host B", binaries, folder / "b", registry.url, *b.setting())
    try:
        host_b.wait_ready(ENGINE, b)
        restored = host_b.pf("restore", f"{reference}:one", ENGINE)
        continued = b.complete(int(restored["sequence"]), again, 64)
        cached, computed = continued["timings"]["cache_n"], continued["timings"]["prompt_n"]
        same = continued["tokens"] == uninterrupted["tokens"] and cached == report["boundary"] and computed == len(again) - cached
        seen = (
            f"T={report['boundary']}, {report['pages']} pages; cached {cached}, computed {computed}; tokens {'equal' if same else 'differ'}"
        )
        outcomes.append(Outcome(f"a fresh server on another host continues equal at temperature 0 ({kind})", same, seen))
        outcomes.append(Outcome(f"no file stays with the second server ({kind})", not list(b.slots.iterdir()), str(b.slots)))
    finally:
        b.stop()
        host_b.stop()
    if not args:
        for other, code, word in (
            (["-ctk", "q8_0", "-fa", "on"], "geometry_mismatch", "q8_0"),
            (["--parallel", "1"], "fingerprint_mismatch", "n_ctx"),
        ):
            outcomes.append(_refused(binary, model, binaries, folder / other[1], registry, f"{reference}:one", other, code, word))
    return outcomes


def _tiny(kind: str, binary: str, model: str, binaries: Path, folder: Path, registry: Registry) -> Outcome:
    """A model whose cache is not pages alone, into a fresh server on another host."""
    note(f"llama: a tiny model, {kind}")
    # Otherwise the server computes a restored prompt again: it goes on in a window only from
    # checkpoints of its own, which are in no file.
    args = ["--swa-full"] if kind == "windows" else []
    reference = f"{registry.url}/real/llama-{kind}"
    a = Server(binary, model, _made(folder / "server-a"), *args)
    host_a = Host("host A", binaries, folder / "a", registry.url, *a.setting())
    try:
        host_a.wait_ready(ENGINE, a)
        prompt = a.ask("/tokenize", content="The agent wrote down each thing that it had seen on its way: " * 40)["tokens"][:300]
        first = prompt + a.complete(0, prompt, 32)["tokens"]
        report = host_a.pf("snapshot", ENGINE, f"{reference}:one", "--sequence", "0", "--push", "wait")
        again = [*first, *a.ask("/tokenize", content=" And then")["tokens"]]
        uninterrupted = a.complete(0, again, 64)
    finally:
        a.stop()
        host_a.stop()
    b = Server(binary, model, _made(folder / "server-b"), *args)
    host_b = Host("host B", binaries, folder / "b", registry.url, *b.setting())
    try:
        host_b.wait_ready(ENGINE, b)
        restored = host_b.pf("restore", f"{reference}:one", ENGINE)
        continued = b.complete(int(restored["sequence"]), again, 64)
        cached = continued["timings"]["cache_n"]
        same = continued["tokens"] == uninterrupted["tokens"]
        seen = f"T={report['boundary']}, {report['pages']} pages, {report['state_bytes']:,} bytes of state; cached {cached}"
        holds = same and cached == report["boundary"] and not list(b.slots.iterdir())
        return Outcome(f"{kind}: a fresh server on another host continues equal", holds, f"{seen}; tokens {'equal' if same else 'differ'}")
    finally:
        b.stop()
        host_b.stop()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _fork(host: Host, server: Server, reference: str, first: list[int], report: dict[str, Any], kind: str) -> Outcome:
    """The session is restored beside itself, and goes another way."""
    restored = host.pf("restore", f"{reference}:one", ENGINE, "--sequence", "1")
    other = [*first, *server.ask("/tokenize", content=" However,")["tokens"]]
    server.complete(int(restored["sequence"]), other, 32)
    fork = host.pf("snapshot", ENGINE, f"{reference}:fork", "--sequence", "1", "--push", "wait")
    share = fork["new_bytes"] / report["resident_bytes"]
    stored = f"{fork['new_bytes']:,} of {fork['resident_bytes']:,} bytes new ({share:.1%})"
    seen = f"{fork['boundary']} tokens, {stored}, parent {fork.get('parent')}"
    holds = share < FORK_SHARE and fork.get("parent") == report["digest"]
    return Outcome(f"a fork of {report['boundary']} tokens stores less than {FORK_SHARE:.0%} more ({kind})", holds, seen)


def _hangs(host: Host, server: Server, reference: str) -> Outcome:
    """A stopped server is given up, and what it does later leaves no file."""
    server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        host.pf("snapshot", ENGINE, f"{reference}:never", "--sequence", "0")
        refused = "it was captured"
    except Stopped as stopped:
        refused = str(stopped).splitlines()[-1]
    took = time.monotonic() - began
    server.process.send_signal(signal.SIGCONT)
    wait_for("the stopped server to go on", server._healthy, server.alive)
    wait_for("its late files to be removed", lambda: not list(server.slots.iterdir()), server.alive)
    host.pf("snapshot", ENGINE, f"{reference}:after", "--sequence", "0", "--push", "wait")
    holds = "did not answer" in refused and took < 30
    return Outcome("a stopped server is given up, and captured when it goes on", holds, f"after {took:.1f} s: {refused}")


def _refused(
    binary: str, model: str, binaries: Path, folder: Path, registry: Registry, reference: str, args: list[str], code: str, word: str
) -> Outcome:
    server = Server(binary, model, _made(folder / "server"), *args)
    host = Host("host C", binaries, folder / "c", registry.url, *server.setting())
    try:
        host.wait_ready(ENGINE, server)
        refused = host.refusal(ENGINE, reference)
        holds = refused is not None and refused.code == code and word in str(refused) and not list(server.slots.iterdir())
        return Outcome(f"a server with {' '.join(args)} is refused by name", holds, str(refused))
    finally:
        server.stop()
        host.stop()
