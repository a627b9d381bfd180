"""Pauses and resumes vLLM: in the process that has the `AsyncLLM`, or beside `vllm serve`.

    python -m pf_connector.vllm.control --engine vllm-0 --server http://127.0.0.1:8000

The server offers `/pause` and `/resume` when it runs with `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from pf_connector.agent import engine_info
from pf_connector.member import Member
from pf_connector.paths import control_path, socket_path
from pf_connector.pause import Pause
from pf_connector.wire import Failure

from .deployment import identity

log = logging.getLogger("pf_connector")

_PAUSE = 25.0
"""Seconds for the steps in hand; the agent gives up a little later."""
_LOOK = 1.0
"""Seconds between two looks of the sidecar at whether the engine is still there."""


class Switch:
    """The member `control`: two functions that pause and resume.

    `limit` bounds a pause, in seconds; the agent's own limit holds too. `prepare` completes the
    registration, as that of `Member`.
    """

    def __init__(
        self,
        path: str,
        registration: dict[str, Any],
        pause: Callable[[], None],
        resume: Callable[[], None],
        prepare: Callable[[], dict[str, Any]] | None = None,
        limit: float | None = None,
    ) -> None:
        self.pause = Pause(pause, resume, limit)
        calls = {"pause": self.pause.begin, "resume": self.pause.end}
        registration = registration | {"member": "control", "verbs": ["pause"]}
        self.member = Member(path, registration, calls, prepare=prepare, on_lost=self.pause.lost).start()

    def close(self) -> None:
        """Leaves the engine, and resumes it if it was paused."""
        self.member.close()


class Control(Switch):
    """Pauses an `AsyncLLM` that runs on an asyncio loop of this process. Make it on that loop,
    or name the loop.

    `pause_limit` in `kv_connector_extra_config` bounds a pause, in seconds.
    """

    def __init__(self, engine: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        who = identity(engine.vllm_config)
        loop = loop or asyncio.get_running_loop()

        def pause() -> None:
            # Without `keep` running requests are thrown away, and `clear_cache` would free what is
            # to be captured.
            wait(engine.pause_generation(mode="keep", clear_cache=False))

        def resume() -> None:
            wait(engine.resume_generation())

        def wait(work: Any) -> None:
            try:
                asyncio.run_coroutine_threadsafe(work, loop).result(_PAUSE)
            except TimeoutError as error:
                raise Failure("timeout", "vLLM did not answer in time") from error

        limit = (engine.vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("pause_limit")
        limit = None if limit is None else float(limit)
        super().__init__(who.socket, {"engine": who.engine, "world": who.world}, pause, resume, who.prepare, limit)


def serve(engine: str, server: str, path: str, agent: str, stop: threading.Event, limit: float | None = None) -> None:
    """Pauses a `vllm serve` over its HTTP interface until told to stop. `limit` bounds a pause, in seconds."""

    def post(what: str) -> None:
        request = urllib.request.Request(f"{server.rstrip('/')}/{what}", data=b"", method="POST")
        try:
            urllib.request.urlopen(request, timeout=_PAUSE).close()
        except urllib.error.HTTPError as error:
            hint = "; run the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise Failure("engine_refused", f"/{what}: HTTP {error.code}{hint}") from error
        except OSError as error:
            raise Failure("engine_lost", f"{server}: {error}") from error

    def prepare() -> dict[str, Any]:
        # The other members have said what the deployment is; a member must say the same. They may
        # be others than last time: a restarted server has another deployment if its model or
        # options changed.
        info = engine_info(agent, engine)
        if info is None or _only_switch(info):
            raise Failure("engine_lost", f"engine {engine!r} has not registered with the agent at {agent}")
        return {"world": info["world"], "deployment": info["deployment"]}

    def pause() -> None:
        post("pause?mode=keep&clear_cache=false")

    switch = Switch(path, {"engine": engine}, pause, lambda: post("resume"), prepare, limit)
    while not stop.wait(_LOOK):
        info = engine_info(agent, engine) if switch.member.registered else None
        if info is not None and _only_switch(info):
            # As long as it stays, the engine exists with the old deployment, and members that say
            # another one are refused.
            log.warning("engine %s has left: leaving it too, and waiting until it is back", engine)
            switch.member.reconnect()
    switch.close()


def _only_switch(info: dict[str, Any]) -> bool:
    """Whether only a sidecar is left of an engine: no memory, and no tables."""
    return not info["groups"] and set(info["verbs"]) <= {"pause"}


def main() -> None:
    """Runs the sidecar with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="pf_connector.vllm.control", description="Pauses a vLLM server for the capture agent.")
    parser.add_argument("--engine", default="vllm", help="the engine's name, as in kv_connector_extra_config")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="where vLLM listens")
    parser.add_argument("--socket", help="the agent's socket for engines [default: the agent's own]")
    parser.add_argument("--agent", help="the agent's control socket [default: the agent's own]")
    parser.add_argument("--pause-limit", type=float, help="seconds after which a pause ends by itself [default: the agent's own limit]")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    serve(args.engine, args.server, socket_path(args.socket), control_path(args.agent), stop, args.pause_limit)


if __name__ == "__main__":
    main()
