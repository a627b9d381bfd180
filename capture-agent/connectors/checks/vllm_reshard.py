"""Captures vLLM over some ranks of tensor parallelism, and continues over another number of
them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from outcome import CLOSED, Outcome
from processes import TIMEOUT, Engine, Host, Registry, fresh, note
from vllm_check import CAPTURE_AFTER, ENGINE, PROMPT, STEPS, write_model

NEAR = 0.05
"""Largest difference of the first log-probability: sums over other ranks, in bf16."""
CASES = (("dense", 2, 1, True), ("dense", 1, 2, True), ("replicated", 1, 2, False))
"""A model, the ranks of the capture, those of the restore, and whether pages are cut. A replicated
head is whole on each rank: its pages are not cut."""
FOUR = (("quartered", 2, 4, True), ("quartered", 4, 1, True))
"""The same over four ranks, each a process: slow where they share two cores."""


def check(python: str, binaries: Path, folder: Path, cases: tuple[tuple[str, int, int, bool], ...] = CASES) -> list[Outcome]:
    """Runs each case through capture and restore, one engine at a time."""
    fresh(folder)
    registry = Registry(binaries, folder / "registry")
    try:
        return [outcome for case in cases for outcome in _case(python, binaries, folder, registry, *case)]
    finally:
        registry.stop()


def _case(python: str, binaries: Path, folder: Path, registry: Registry, kind: str, ranks: int, others: int, cut: bool) -> list[Outcome]:
    name = f"{kind}-{ranks}-{others}"
    model = write_model(python, folder / f"model-{name}", kind)
    args = ["--model", model, "--engine", ENGINE, "--block", "32"]
    reference = f"{registry.url}/real/{name}:mid"
    random.seed(7)
    prompt = [random.randrange(1, 500) for _ in range(PROMPT)]
    host = Host(f"host of {name}", binaries, folder / name, registry.url)
    try:
        note(f"{kind}: generating over {ranks} ranks, captured after {CAPTURE_AFTER} tokens")
        full, report = _capture(python, host, [*args, "--ranks", str(ranks)], prompt, reference)
        note(f"{kind}: starting a fresh vLLM over {others} ranks")
        case = f"{kind}, {ranks} to {others} ranks"
        return _restore(python, host, [*args, "--ranks", str(others)], prompt, full, report, reference, case, cut)
    finally:
        host.stop()


def _start(python: str, host: Host, name: str, args: list[str]) -> Engine:
    # Each rank is a process that imports all of vLLM, and they share the cores.
    limit = TIMEOUT * max(1, int(args[args.index("--ranks") + 1]) // 2)
    engine = Engine(python, "vllm_host.py", host.folder / name, [*args, "--socket", str(host.engines)], limit)
    try:
        engine.until("ready")
        host.wait_ready(ENGINE, engine)
    except BaseException:
        engine.stop()
        raise
    return engine


def _capture(python: str, host: Host, args: list[str], prompt: list[int], reference: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = _start(python, host, "before", args)
    try:
        engine.send(tokens=prompt, count=STEPS, name="captured")
        engine.until("progress", lambda e: e["tokens"] >= CAPTURE_AFTER)
        report = host.pf("snapshot", ENGINE, reference, "--push", "wait")
        return engine.until("done"), report
    finally:
        engine.stop()


def _restore(
    python: str,
    host: Host,
    args: list[str],
    prompt: list[int],
    full: dict[str, Any],
    report: dict[str, Any],
    reference: str,
    case: str,
    is_cut: bool,
) -> list[Outcome]:
    engine = _start(python, host, "after", args)
    try:
        refused = host.refusal(ENGINE, reference)
        named = refused is not None and refused.code == "fingerprint_mismatch" and "--reshard" in str(refused)
        restored = host.pf("restore", reference, ENGINE, "--reshard")
        boundary = report["boundary"]
        tokens = (prompt + full["tokens"])[: boundary + 1]
        made = len(tokens) - len(prompt)
        engine.send(tokens=tokens, count=STEPS - made, name="continued")
        done = engine.until("done")
        # What this engine makes of the same tokens without the snapshot.
        engine.send(tokens=tokens, count=1, name="computed", salt="other")
        computed = engine.until("done")
    finally:
        engine.stop()
    cut = restored["resharded"]
    taken = done["cached"] == boundary and not computed["cached"] and (cut["pages"] > 0) == is_cut
    first, other, own = (float.fromhex(scores[at]) for scores, at in ((full["scores"], made), (done["scores"], 0), (computed["scores"], 0)))
    near = done["tokens"][0] == full["tokens"][made] and abs(other - first) <= NEAR
    pairs = enumerate(zip(done["tokens"], full["tokens"][made:], strict=False))
    same = next((at for at, pair in pairs if pair[0] != pair[1]), len(done["tokens"]))
    return [
        Outcome(
            f"{case}: {CLOSED}: without --reshard the snapshot is refused, and the option named",
            named,
            str(refused or "it was restored")[-160:],
        ),
        Outcome(f"{case}: the state is given to these ranks, proven, and taken at T", taken, f"{done['cached']} tokens, {cut}"),
        Outcome(
            f"{case}: the continuation begins as that of the captured engine",
            near,
            f"log-probabilities {first:.6f} captured, {other:.6f} continued, {own:.6f} anew; {same} of {STEPS - made} tokens equal",
        ),
    ]
