"""What a new request costs the thread that schedules: the connector's half alone, with an agent
that answers at once. Needs no vLLM.

    python3 checks/request_cost.py [TOKENS ...]

Prints one line of JSON for each length: milliseconds on the scheduler's thread while nothing lies
ready; of all looks at one request while a state of almost the same length lies ready (the wait for
answers, at most 2 ms a step, is left out), for another prompt and for the prompt of that state; of
the longest look; and of all keys on their own thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / folder) for folder in ("shared", "shared/tests", "vllm", "vllm/tests")]

from test_vllm import DEPLOYMENT, HYBRID, request  # noqa: E402

from fake_agent import FakeAgent  # noqa: E402
from pf_connector.prefix import Chain, root  # noqa: E402
from pf_connector.vllm import scheduler as module  # noqa: E402
from pf_connector.vllm.deployment import Identity  # noqa: E402

ROUNDS = 20


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 4)


def measure(tokens: int, folder: str) -> dict[str, Any]:
    same = False

    def answer(call: str, args: dict[str, Any]) -> dict[str, Any]:
        # As the agent: another prompt is known by its first keys, that of a state only by its last.
        more = same and tokens - 1 not in args.get("keys", ())
        return {"match": "later"} if more else {"match": "none", "reason": "-"}

    agent = FakeAgent(f"{folder}/{tokens}", answer)
    scheduler = module.Scheduler(Identity("e", agent.path, 1, DEPLOYMENT), HYBRID)
    scheduler.bind(SimpleNamespace())
    link = agent.link(0)
    scheduler.member.wait_registered(10)
    prompt = [i * 1_000_003 % 151_936 for i in range(tokens)]
    idle = []
    for number in range(ROUNDS):
        one = request(name=f"idle-{number}", all_token_ids=prompt)
        begun = time.perf_counter()
        scheduler.matched(one, 0)
        idle.append(time.perf_counter() - begun)
    link.call("staged", {"version": 1, "boundaries": [tokens - 1], "expected": False})
    module._WAIT = 0.0
    other = [looks(scheduler, f"other-{number}", prompt) for number in range(ROUNDS)]
    same = True
    equal = [looks(scheduler, f"same-{number}", prompt) for number in range(ROUNDS)]
    begun = time.perf_counter()
    Chain(root(bytes(32), "", None), prompt).key(tokens - 1)
    keys = time.perf_counter() - begun
    scheduler.close()
    agent.close()
    return {
        "tokens": tokens,
        "nothing_ready_ms": milliseconds(idle),
        "other_prompt_ms": milliseconds([sum(one) for one in other]),
        "same_prompt_ms": milliseconds([sum(one) for one in equal]),
        "looks": statistics.median(len(one) for one in equal),
        "longest_look_ms": round(max(max(one) for one in [*other, *equal]) * 1000, 3),
        "keys_thread_ms": round(keys * 1000, 1),
    }


def looks(scheduler: module.Scheduler, name: str, prompt: list[int]) -> list[float]:
    """Seconds of each look at one request, in steps of 2 ms."""
    one, found = request(name=name, all_token_ids=prompt), []
    scheduler.step()
    while True:
        begun = time.perf_counter()
        answer = scheduler.matched(one, 0)
        found.append(time.perf_counter() - begun)
        if answer is not None:
            return found
        # A step of the engine: the thread waits for the device.
        time.sleep(0.002)


def main() -> None:
    lengths = [int(word) for word in sys.argv[1:]] or [2_000, 32_000, 128_000, 380_000]
    with tempfile.TemporaryDirectory() as folder:
        for tokens in lengths:
            print(json.dumps(measure(tokens, folder)), flush=True)


if __name__ == "__main__":
    main()
