"""What a new request costs the thread that schedules: the connector's half alone, with an agent
that answers at once. Needs no vLLM.

    python3 checks/request_cost.py [TOKENS ...]

Prints one line of JSON for each length. Milliseconds on the scheduler's thread: while nothing lies
ready; of all looks at one request while a state of almost the same length lies ready (the wait for
answers, at most 2 ms a step and only if the engine has one request, is left out), for another
prompt and for the prompt of that state; of all looks in automatic mode; of the longest look. Then
how long another thread waits for the interpreter at most while the connector's own threads ask in
automatic mode, and while they do nothing; and from the request to its answer in automatic mode.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / folder) for folder in ("shared", "shared/tests", "vllm", "vllm/tests")]

from test_vllm import DEPLOYMENT, HYBRID, request  # noqa: E402

import fake_agent  # noqa: E402
from pf_connector.vllm import scheduler as module  # noqa: E402
from pf_connector.vllm.automatic import Auto  # noqa: E402
from pf_connector.vllm.deployment import Identity  # noqa: E402

ROUNDS = 20
STEP = 0.002
"""Seconds between two looks: a step of the engine, in which the thread waits for the device."""


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 4)


def agent(path: str, tokens: int, told: Connection) -> None:
    """An agent in a process of its own, that answers at once. The salt says whose prompt a request
    has."""

    def answer(call: str, args: dict[str, Any]) -> dict[str, Any]:
        # As the agent: another prompt is known by its first keys, that of a state only by its last,
        # or by its tokens.
        if call == "match-keys" and args["salt"] == "same" and tokens - 1 not in args["keys"]:
            return {"match": "later"}
        return {"match": "none", "reason": "-"}

    def head(body: bytes) -> dict[str, Any]:
        """Reading tokens is not the subject."""
        (length,) = struct.unpack_from("<I", body, 1)
        message: dict[str, Any] = json.loads(body[5 : 5 + length])
        return message

    fake_agent.__dict__["unpacked"] = head
    made = fake_agent.FakeAgent(path, answer)
    told.send(True)
    link = made.link(0)
    told.recv()
    link.call("staged", {"version": 1, "boundaries": [tokens - 1], "expected": False})
    told.send(True)
    told.recv()


def measure(tokens: int, folder: str) -> dict[str, Any]:
    path = f"{folder}/{tokens}"
    told, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=agent, args=(path, tokens, its))
    process.start()
    told.recv()
    auto = Auto.of({"repository": "agents/{user}", "match_limit": 60})
    scheduler = module.Scheduler(Identity("e", path, 1, DEPLOYMENT), HYBRID, auto=auto)
    scheduler.bind(SimpleNamespace())
    if not scheduler.member.wait_registered(10):
        raise TimeoutError("the connector did not register")
    # As without automatic mode.
    auto, scheduler._auto = scheduler._auto, None
    prompt = [i * 1_000_003 % 151_936 for i in range(tokens)]
    idle = []
    for number in range(ROUNDS):
        one = request(name=f"idle-{number}", all_token_ids=prompt)
        begun = time.perf_counter()
        scheduler.matched(one, 0)
        idle.append(time.perf_counter() - begun)
    told.send(True)
    told.recv()
    module._WAIT = 0.0
    other = [looks(scheduler, f"other-{number}", prompt, salt="other") for number in range(ROUNDS)]
    equal = [looks(scheduler, f"same-{number}", prompt, salt="same") for number in range(ROUNDS)]
    scheduler._auto = auto
    searched = [looks(scheduler, f"auto-{number}", prompt, user="alice") for number in range(ROUNDS)]
    waits = [longest_wait(scheduler, f"wait-{number}", prompt) for number in range(ROUNDS)]
    scheduler.close()
    told.send(True)
    process.join()
    return {
        "tokens": tokens,
        "nothing_ready_ms": milliseconds(idle),
        "other_prompt_ms": milliseconds([sum(one) for one in other]),
        "same_prompt_ms": milliseconds([sum(one) for one in equal]),
        "same_prompt_looks": statistics.median(len(one) for one in equal),
        "automatic_ms": milliseconds([sum(one) for one in searched]),
        "automatic_looks": statistics.median(len(one) for one in searched),
        "longest_look_ms": round(max(max(one) for one in [*other, *equal, *searched]) * 1000, 3),
        "interpreter_wait_ms": milliseconds([busy for busy, _, _ in waits]),
        "interpreter_wait_idle_ms": milliseconds([idle for _, idle, _ in waits]),
        "automatic_answer_ms": milliseconds([took for _, _, took in waits]),
    }


def coming(scheduler: module.Scheduler, name: str, prompt: list[int], salt: str | None, user: str | None) -> Any:
    one = request(name=name, all_token_ids=prompt, cache_salt=salt, kv_transfer_params={"pf": {"user": user}} if user else None)
    scheduler.add(one)
    scheduler.step()
    return one


def looks(scheduler: module.Scheduler, name: str, prompt: list[int], salt: str | None = None, user: str | None = None) -> list[float]:
    """Seconds of each look at one request."""
    one, found = coming(scheduler, name, prompt, salt, user), []
    while True:
        begun = time.perf_counter()
        answer = scheduler.matched(one, 0)
        found.append(time.perf_counter() - begun)
        if answer is not None:
            scheduler.finish(one)
            return found
        time.sleep(STEP)


def longest_wait(scheduler: module.Scheduler, name: str, prompt: list[int]) -> tuple[float, float, float]:
    """The longest time in which this thread did not get the interpreter back: while a request is
    asked for, and for as long without; and how long asking took. All three in seconds."""
    one = coming(scheduler, name, prompt, None, "alice")
    begun, busy = time.perf_counter(), 0.0
    while scheduler.matched(one, 0) is None:
        busy = max(busy, hand_over())
    took = time.perf_counter() - begun
    scheduler.finish(one)
    end, idle = time.perf_counter() + took, 0.0
    while time.perf_counter() < end:
        idle = max(idle, hand_over())
    return busy, idle, took


def hand_over() -> float:
    begun = time.perf_counter()
    time.sleep(0)
    return time.perf_counter() - begun


def main() -> None:
    lengths = [int(word) for word in sys.argv[1:]] or [2_000, 32_000, 128_000, 380_000]
    with tempfile.TemporaryDirectory() as folder:
        for tokens in lengths:
            print(json.dumps(measure(tokens, folder)), flush=True)


if __name__ == "__main__":
    main()
