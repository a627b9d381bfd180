"""Registry, agents and engines as child processes, each host with folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONNECTORS = Path(__file__).resolve().parent.parent
ROOTS = [CONNECTORS / name for name in ("shared", "vllm", "transformers", "sglang")]
sys.path[:0] = [str(root) for root in ROOTS]

from pf_connector.agent import Refused, request  # noqa: E402

TIMEOUT = 300.0
"""Timeout of every wait, in seconds: engines start slowly on two cores."""
PROCESSORS = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
"""Processors that the model leaves to vLLM's other processes. On the CPU, vLLM leaves one more if
there is a connector. If none is left for the model then, it leaves none at all, and the threads of
the model wait for each other. For servers that are compared with one without connector."""


class Stopped(Exception):
    """A child process ended, or did not do what it should in time."""


def wait_for(what: str, look: Callable[[], Any], alive: Callable[[], None] = lambda: None, pause: float = 0.05) -> Any:
    """Calls `look` each `pause` seconds until it returns something, and returns that."""
    end = time.monotonic() + TIMEOUT
    while not (found := look()):
        alive()
        if time.monotonic() > end:
            raise Stopped(f"waited {TIMEOUT:.0f} s for {what}")
        time.sleep(pause)
    return found


class Child:
    """A child process whose output goes to a log."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str], **options: Any) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stderr=out, env=env, stdout=options.pop("stdout", out), **options)

    def alive(self) -> None:
        """Raises with the end of the log if the process is gone."""
        if self.process.poll() is not None:
            raise Stopped(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def samples(text: str, metric: str) -> list[tuple[dict[str, str], float]]:
    """The samples of a metric in Prometheus's text, each with its labels."""
    found = re.findall(rf"^{re.escape(metric)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]


class Registry(Child):
    """`pf-registry` on a free port."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        command = [str(binaries / "pf-registry"), "serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data")]
        super().__init__("pf-registry", command, folder / "log", _env(folder), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.process.wait()
            self.alive()
        self.url = line.removeprefix("listening on ").strip()


class Host:
    """A GPU host without a GPU: a home, a local store, an agent."""

    def __init__(self, name: str, binaries: Path, folder: Path, registry: str, *options: str) -> None:
        """`options` are further ones of `pf-agent serve`."""
        folder.mkdir(parents=True)
        self.name = name
        self.folder = folder
        self.control = folder / "agent.sock"
        self.engines = folder / "engines.sock"
        self._binaries = binaries
        self._registry = registry
        self._options = options
        self.agent = self.start()

    def start(self) -> Child:
        """Starts the agent, anew after `kill`."""
        command = [str(self._binaries / "pf-agent"), "serve", "--data", str(self.folder / "agent"), "--socket", str(self.control)]
        command += ["--engine-socket", str(self.engines), "--registry", self._registry, *self._options]
        for left in (self.control, self.engines):
            left.unlink(missing_ok=True)
        self.agent = Child(f"pf-agent on {self.name}", command, self.folder / "agent.log", _env(self.folder))
        wait_for("the agent", lambda: self.control.exists() and self.engines.exists(), self.agent.alive)
        return self.agent

    def kill(self) -> None:
        """Ends the agent as a power cut would, as far as a process can be."""
        self.agent.process.kill()
        self.agent.process.wait()

    def pf(self, *args: str) -> dict[str, Any]:
        """`pf --json`."""
        command = [str(self._binaries / "pf"), *args, "--json"]
        places = {"PF_AGENT_SOCKET": str(self.control), "PF_REGISTRY": self._registry, "PF_STORE": str(self.folder / "store")}
        env = _env(self.folder) | places
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise Stopped(f"pf {' '.join(args)} ended with {done.returncode}:\n{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def engine(self, name: str) -> dict[str, Any] | None:
        """The agent's description of an engine."""
        return next((e for e in self.pf("engines")["engines"] if e["engine"] == name), None)

    def wait_ready(self, name: str, engine: Child, also: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """Waits until an engine can be used."""

        def look() -> dict[str, Any] | None:
            info = self.engine(name)
            return info if info and info["state"]["state"] == "ready" and also(info) else None

        found: dict[str, Any] = wait_for(f"{name} to be ready on {self.name}", look, engine.alive)
        return found

    def saved(self, ticket: str) -> dict[str, Any]:
        """What became of a save, once it has ended."""

        def look() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = request(str(self.control), "GET", f"/v1/saves/{ticket}")
            except Refused:
                return None
            return found if found["state"] != "pending" else None

        found: dict[str, Any] = wait_for(f"save {ticket}", look, self.agent.alive)
        return found

    def counts(self, metric: str, label: str) -> dict[str, int]:
        """A counter of the agent's metrics, by the values of one of its labels."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(self.control))
            sock.sendall(b"GET /metrics HTTP/1.0\r\nhost: agent\r\n\r\n")
            text = b"".join(iter(lambda: sock.recv(1 << 16), b"")).decode()
        found: Counter[str] = Counter()
        for labels, value in samples(text, metric):
            found[labels.get(label, "")] += int(value)
        return dict(found)

    def wait_pushed(self) -> None:
        """Waits until the registry has everything."""
        wait_for("the pushes", lambda: all(job["state"] == "done" for job in self.pf("pushes")["pushes"]), self.agent.alive)

    def refusal(self, name: str, reference: str) -> Refused | None:
        """The agent's refusal to restore this; `None` if it restores it."""
        try:
            request(str(self.control), "POST", f"/v1/engines/{name}/restores", {"reference": reference}, timeout=TIMEOUT)
        except Refused as refused:
            return refused
        return None

    def stop(self) -> None:
        """Ends the agent."""
        self.agent.stop()


class Events:
    """Lines of JSON from a descriptor, with a limit: a hung engine must not hang the check."""

    def __init__(self, descriptor: int, limit: float) -> None:
        """`limit` is in seconds."""
        self._limit = limit
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def next(self) -> dict[str, Any] | None:
        """The next event, `None` at the end. Raises `TimeoutError` after the limit."""
        try:
            line = self._lines.get(timeout=self._limit)
        except queue.Empty as empty:
            raise TimeoutError(f"no event for {self._limit:.0f} s") from empty
        if line is None:
            # Stays the end for the next call.
            self._lines.put(None)
            return None
        event: dict[str, Any] = json.loads(line)
        return event


class Engine(Child):
    """An engine program of this folder.

    It reads commands from standard input and writes events to a pipe of their own.
    """

    def __init__(self, python: str, program: str, folder: Path, args: list[str], limit: float = TIMEOUT) -> None:
        """`limit` is how many seconds may pass between two events."""
        folder.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        command = [python, str(CONNECTORS / "checks" / program), "--events", str(write), *args]
        try:
            super().__init__(
                program,
                command,
                folder / "engine.log",
                engine_environment(folder),
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        self._events = Events(read, limit)

    def send(self, **work: Any) -> None:
        """Asks for work."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()

    def until(self, event: str, where: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The next such event.

        Raises `Stopped` if the engine ends, or sends nothing for too long.
        """
        while True:
            try:
                found = self._events.next()
            except TimeoutError as error:
                raise Stopped(f"{self.name}: {error} while waiting for {event!r}:\n{self.tail()}") from error
            if found is None:
                self.process.wait()
                raise Stopped(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
            if found["event"] == event and where(found):
                return found

    def stop(self) -> None:
        """Closes standard input and waits; ends it the hard way if it stays."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            super().stop()
        # Workers may outlive it, and keep cores and memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def documented() -> dict[str, Any]:
    """The first `--kv-transfer-config` of docs/connectors.md: servers run with the one that users
    copy."""
    page = (CONNECTORS.parent.parent / "docs/connectors.md").read_text()
    given = re.search(r"--kv-transfer-config '(\{.*?\})'$", page, re.MULTILINE)
    assert given is not None, "docs/connectors.md shows how a server gets the connector"
    found: dict[str, Any] = json.loads(given[1])
    return found


class Server(Child):
    """An OpenAI server of vLLM with the connector, in a session of its own."""

    def __init__(
        self,
        python: str,
        folder: Path,
        model: str,
        engine: str | None,
        socket: Path,
        args: list[str],
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the connector's. Without a name of the engine it has no connector."""
        folder.mkdir(parents=True, exist_ok=True)
        with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
            port = free.server_address[1]
        transfer = documented()
        transfer["kv_connector_extra_config"] |= {"engine": engine, "socket": str(socket), **settings}
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(port), *args]
        command += [] if engine is None else ["--kv-transfer-config", json.dumps(transfer)]
        variables = engine_environment(folder) | (environment or {})
        super().__init__("vllm", command, folder / "server.log", variables, start_new_session=True)
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        """Waits until it answers."""
        wait_for("the server", lambda: self._answers(), self.alive)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """A metric of vLLM, summed over its labels. Raises `Stopped` if there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT) as answer:
            text = answer.read().decode()
        values = [value for _, value in samples(text, name)]
        if not values:
            raise Stopped(f"vLLM has no metric {name}")
        return sum(values)

    def complete(
        self, prompt: list[int], count: int, *, salt: str | None = None, pf: dict[str, Any] | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """A completion of exactly `count` tokens, or until the token `stop`, greedily, with
        log-probabilities."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {}) | ({"kv_transfer_params": {"pf": pf}} if pf else {})
        body |= {} if stop is None else {"stop_token_ids": [stop]}
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", data, kind, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            raise Stopped(f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from error

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ends it."""
        super().stop()
        self.kill()


def _env(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS") if name in os.environ}
    return kept | {"HOME": str(folder)}


def engine_environment(folder: Path) -> dict[str, str]:
    """Environment of a process with an engine or a connector."""
    return _env(folder) | {
        "PYTHONPATH": os.pathsep.join(map(str, ROOTS)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def fresh(folder: Path) -> Path:
    """Makes or empties a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def note(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)
