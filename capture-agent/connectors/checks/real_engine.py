"""Checks the connectors with real engines, real agents and a real registry, and prints the results.

python real_engine.py --python VENV/bin/python --binaries DIR --work DIR [CHECK ...]
python real_engine.py --llama-server FILE --llama-model FILE --binaries DIR --work DIR llama
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from outcome import Outcome
from processes import Stopped, note

CHECKS = (
    "vllm-dense",
    "vllm-hybrid",
    "vllm-hybrid-shared",
    "vllm-window",
    "vllm-latent",
    "vllm-adapters",
    "vllm-server",
    "vllm-server-hybrid",
    "vllm-automatic",
    "vllm-automatic-hybrid",
    "vllm-preemption",
    "vllm-hung",
    "vllm-reshard",
    "sglang",
    "sglang-pages",
    "transformers",
    "llama",
)
NAMED = ("latency", "vllm-reshard-four")
"""Checks that run only if the command line names them."""


def table(name: str, seconds: float, outcomes: list[Outcome]) -> str:
    """The lines of a check."""
    lines = [f"  {'ok  ' if outcome.holds else 'FAIL'}  {outcome.claim}\n        {outcome.seen}" for outcome in outcomes]
    return "\n".join([f"\n{name} ({seconds:.0f} s)", *lines])


def main() -> int:
    """Runs the checks. Returns 0 if all of them pass, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--llama-server", default="llama-server")
    parser.add_argument("--llama-model", default="")
    parser.add_argument("--binaries", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS + NAMED))
    args = parser.parse_args()
    from latency_check import check as check_latency
    from llama_check import check as check_llama
    from sglang_check import check as check_sglang
    from transformers_check import check as check_transformers
    from vllm_automatic_check import check as check_automatic
    from vllm_automatic_hybrid_check import check as check_automatic_hybrid
    from vllm_check import check as check_vllm
    from vllm_hung_check import check as check_hung
    from vllm_preemption_check import check as check_preemption
    from vllm_reshard import FOUR
    from vllm_reshard import check as check_reshard
    from vllm_server_check import check as check_server

    failed = False
    for name in args.checks or CHECKS:
        started, folder = time.monotonic(), args.work / name
        try:
            if name == "transformers":
                outcomes = check_transformers(args.python, args.binaries, folder)
            elif name.startswith("vllm-server"):
                outcomes = check_server("hybrid" if name.endswith("hybrid") else "dense", args.python, args.binaries, folder)
            elif name == "vllm-automatic":
                outcomes = check_automatic(args.python, args.binaries, folder)
            elif name == "vllm-automatic-hybrid":
                outcomes = check_automatic_hybrid(args.python, args.binaries, folder)
            elif name == "vllm-preemption":
                outcomes = check_preemption(args.python, args.binaries, folder)
            elif name == "vllm-hung":
                outcomes = check_hung(args.python, args.binaries, folder)
            elif name.startswith("sglang"):
                outcomes = check_sglang(args.sglang_python, args.binaries, folder, 16 if name.endswith("pages") else 1)
            elif name == "llama":
                outcomes = check_llama(args.llama_server, args.llama_model, args.binaries, folder)
            elif name == "latency":
                outcomes = check_latency(args.python, args.binaries, folder)
            elif name == "vllm-reshard":
                outcomes = check_reshard(args.python, args.binaries, folder)
            elif name == "vllm-reshard-four":
                outcomes = check_reshard(args.python, args.binaries, folder, FOUR)
            else:
                outcomes = check_vllm(name.removeprefix("vllm-"), args.python, args.binaries, folder)
        except (Stopped, AssertionError) as error:
            outcomes = [Outcome("it runs", False, str(error))]
        except Exception:
            # The other checks run all the same.
            outcomes = [Outcome("it runs", False, traceback.format_exc())]
        passed, seconds = all(outcome.holds for outcome in outcomes), time.monotonic() - started
        failed |= not passed
        note(f"{name}: {'passed' if passed else 'FAILED'} after {seconds:.0f} s")
        # At once: a run that is stopped has shown what it knows.
        print(table(name, seconds, outcomes), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
