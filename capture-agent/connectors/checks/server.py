"""A vLLM server and its sidecar as child processes, and streams of tokens from it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from processes import PATIENCE, Child, Host, Stopped, engine_environment, wait_for

NAME = "m"


class Stream(threading.Thread):
    """A request, in a thread: its tokens and when they came."""

    def __init__(self, port: int, tokens: list[int], count: int) -> None:
        super().__init__(daemon=True)
        self.begun = time.monotonic()
        self.came: list[tuple[float, int]] = []
        self.cached: int | None = None
        self.error: Exception | None = None
        self._port = port
        self._body = {
            **{"model": NAME, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
        }
        self.start()

    def run(self) -> None:
        """Reads to the end."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Stopped(f"HTTP {answer.status}: {answer.read(2000)!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (OSError, http.client.HTTPException, ValueError, Stopped) as error:
            self.error = error

    def _take(self, chunk: dict[str, Any]) -> None:
        now = time.monotonic()
        for choice in chunk["choices"]:
            self.came += [(now, token) for token in choice.get("token_ids") or ()]
        if usage := chunk.get("usage"):
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def tokens(self) -> list[int]:
        """What came so far."""
        return [token for _, token in self.came]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.came[0][0] - self.begun

    def gap(self, since: float) -> float:
        """The longest time without a token from `since` until now, or to the stream's end."""
        times = [since, *(at for at, _ in self.came if at > since)]
        if self.is_alive():
            times.append(time.monotonic())
        return max((after - before for before, after in zip(times, times[1:], strict=False)), default=0.0)

    def reach(self, count: int) -> None:
        """Waits for so many tokens."""
        wait_for(f"{count} tokens", lambda: len(self.came) >= count, self._alive)

    def done(self) -> Stream:
        """Waits for the end."""
        self.join(PATIENCE)
        self._alive()
        return self

    def _alive(self) -> None:
        if self.error is not None:
            raise Stopped(f"a stream broke after {len(self.came)} tokens: {self.error}")


class Server(Child):
    """An OpenAI server with the connector. `vllm serve` wants a distribution of this name, and that for CPUs has another."""

    def __init__(self, python: str, folder: Path, model: str, host: Host, engine: str) -> None:
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        transfer = {
            "kv_connector": "PfConnector",
            "kv_connector_module_path": "pf_connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"engine": engine, "socket": str(host.engines)},
        }
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init", "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "72", "--block-size", "32", "--seed", "0"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
        env = engine_environment(folder) | {"VLLM_SERVER_DEV_MODE": "1"}
        super().__init__("vLLM's server", command, folder / "server.log", env)

    def ready(self) -> None:
        """Waits until it serves."""

        def look() -> bool:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_for("vLLM's server", look, self.alive)

    def paused(self) -> bool:
        """Whether it is paused."""
        with urlopen(f"http://127.0.0.1:{self.port}/is_paused", timeout=PATIENCE) as answer:
            return bool(json.load(answer)["is_paused"])

    def stream(self, tokens: list[int], count: int) -> Stream:
        """Begins a request."""
        return Stream(self.port, tokens, count)


class Sidecar(Child):
    """The process that pauses the server."""

    def __init__(self, python: str, folder: Path, server: Server, host: Host, engine: str, limit: float) -> None:
        command = [python, "-m", "pf_connector.vllm.control", "--engine", engine, "--server", f"http://127.0.0.1:{server.port}"]
        command += ["--socket", str(host.engines), "--agent", str(host.control), "--pause-limit", str(limit)]
        super().__init__("the sidecar", command, folder / "sidecar.log", engine_environment(folder))
