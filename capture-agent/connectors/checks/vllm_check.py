"""Captures vLLM on one host while it generates.

A process on another host, which has never seen the prompt, continues the generation.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from outcome import APART, CLOSED, FIRST_STEP, REPLAY, Outcome
from processes import Engine, Host, Registry, Stopped, fresh, note
from proxy import Proxy

ENGINE = "vllm-0"
PROMPT = 100
SHARED = "hybrid-shared"
"""The hybrid model with a prompt of more than a block, so that vLLM has its first blocks."""
PROMPTS = {SHARED: 797}
"""Tokens of the prompt, where these are not `PROMPT`. 768 are whole blocks of both sizes below, and
few tokens follow them: vLLM keeps the recurrent state at the end of a block only then."""
HYBRIDS = ("hybrid", SHARED)
BLOCK = 128
"""What divides a block of the hybrid model: vLLM chooses 256 tokens with AVX2, 384 with AVX-512."""
STEPS = 400
CAPTURE_AFTER = 20
FORKS = 12
FORK_STEPS = 60
"""Tokens of each fork: two blocks of the dense model."""
LOGITS = ("dense", *HYBRIDS)
"""Models that run with the logits check. The others run as vLLM does by default."""
TOLD = 10.0
"""Seconds for which counts of requests may be on their way to the agent."""


def check(kind: str, python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Runs one model through capture and restore."""
    fresh(folder)
    note(f"{kind}: writing a model with random weights")
    model = write_model(python, folder / "model", {"adapters": "dense", SHARED: "hybrid"}.get(kind, kind))
    args = [
        "--model",
        model,
        "--engine",
        ENGINE,
        *(["--block", "32"] if kind not in HYBRIDS else []),
        *(["--logits"] if kind in LOGITS else []),
    ]
    registry = Registry(binaries, folder / "registry")
    try:
        if kind == "adapters":
            return _adapters(python, binaries, folder, registry, args)
        return _hosts(kind, python, binaries, folder, registry, args)
    finally:
        registry.stop()


def write_model(python: str, folder: Path, kind: str, seed: int = 1) -> str:
    """A model or an adapter of `models.py`; its folder."""
    program = Path(__file__).resolve().parent / "models.py"
    done = subprocess.run([python, str(program), kind, str(folder), str(seed)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Stopped(f"no model {kind}: models.py ended with {done.returncode}:\n{done.stderr}")
    return str(folder)


def _hosts(kind: str, python: str, binaries: Path, folder: Path, registry: Registry, args: list[str]) -> list[Outcome]:
    reference = f"{registry.url}/real/{kind}"
    random.seed(7)
    prompt = [random.randrange(1, 500) for _ in range(PROMPTS.get(kind, PROMPT))]
    a = Host("host A", binaries, folder / "a", registry.url)
    try:
        full, report, outcomes = _capture(kind, python, a, args, prompt, reference)
    finally:
        a.stop()
    b = Host("host B", binaries, folder / "b", registry.url)
    try:
        outcomes += _restore(kind, python, b, args, prompt, full, report, reference)
        if kind == "dense":
            outcomes.append(_others(python, b, folder, args, f"{reference}:mid"))
        return outcomes
    finally:
        b.stop()


def _capture(
    kind: str, python: str, host: Host, args: list[str], prompt: list[int], reference: str
) -> tuple[dict[str, Any], dict[str, Any], list[Outcome]]:
    proxy = Proxy(host.folder / "proxy.sock", host.engines)
    note(f"{kind}: starting vLLM on host A")
    engine = Engine(python, "vllm_host.py", host.folder / "engine", [*args, "--socket", str(host.folder / "proxy.sock")])
    try:
        engine.until("ready")
        host.wait_ready(ENGINE, engine)
        note(f"{kind}: generating without interruption")
        # Another salt, so that the second run computes its prompt itself.
        engine.send(tokens=prompt, count=STEPS, name="uninterrupted", salt="other")
        whole = engine.until("done")
        note(f"{kind}: generating, captured after {CAPTURE_AFTER} tokens")
        engine.send(tokens=prompt, count=STEPS, name="captured")
        engine.until("progress", lambda e: e["tokens"] >= CAPTURE_AFTER)
        report = _snapshot_in_block(host, engine, f"{reference}:mid", BLOCK if kind in HYBRIDS else 32)
        if kind == "hybrid":
            # The same engine again, with a connector that leaves out recurrent state.
            proxy.omit = "recurrent"
            proxy.cut()
            host.wait_ready(ENGINE, engine, lambda info: not any(g.startswith("recurrent") for g in info["groups"]))
            host.pf("snapshot", ENGINE, f"{reference}:stateless", "--push", "wait")
        full = engine.until("done")
    finally:
        engine.stop()
        proxy.close()
    same = full["tokens"] == whole["tokens"] and full["scores"] == whole["scores"]
    seen = (
        f"T={report['boundary']}, {report['pages']} pages, {report['moved_bytes']:,} bytes moved, "
        f"{report['state_bytes']:,} of them state, paused {report['pause_seconds'] * 1e3:.0f} ms, {report['exactness']}"
    )
    outcomes = [Outcome("a running generation is captured, and continues unchanged", same, seen)]
    if kind in LOGITS:
        outcomes.append(Outcome(f"{FIRST_STEP}: a capture records those of its next step", report["oracle"], "with --logits-processors"))
    return full, report, outcomes


def _snapshot_in_block(host: Host, engine: Engine, reference: str, block: int) -> dict[str, Any]:
    """Captures at a token position inside a block, so that the last page is partly filled."""
    for _ in range(5):
        report = host.pf("snapshot", ENGINE, reference, "--push", "wait")
        if report["boundary"] % block:
            return report
    raise AssertionError("five captures in a row ended at the end of a block")


def _restore(
    kind: str, python: str, host: Host, args: list[str], prompt: list[int], full: dict[str, Any], report: dict[str, Any], reference: str
) -> list[Outcome]:
    note(f"{kind}: starting a fresh vLLM on host B")
    proxy = Proxy(host.folder / "proxy.sock", host.engines)
    engine = Engine(python, "vllm_host.py", host.folder / "engine", [*args, "--socket", str(host.folder / "proxy.sock")])
    outcomes = []
    try:
        engine.until("ready")
        host.wait_ready(ENGINE, engine)
        if kind == "hybrid":
            outcomes.append(_refused(host, f"{reference}:stateless"))
        else:
            # The engine has computed the first blocks of the prefix itself, in another batch of
            # tokens than the captured engine.
            engine.send(tokens=[*prompt, 1, 2, 3], count=10, name="shared")
            engine.until("done")
        restored = host.pf("restore", f"{reference}:mid", ENGINE)
        boundary = report["boundary"]
        tokens = (prompt + full["tokens"])[: boundary + 1]
        made = len(tokens) - len(prompt)
        if kind == "hybrid":
            # Less than a block: its tokens stay with this request, and the next one finds no shared
            # prefix.
            outcomes.append(_recomputed(engine, proxy, tokens))
        engine.send(tokens=tokens, count=STEPS - made, name="continued")
        done = engine.until("done")
        cached = done["cached"]
        seen = f"{cached} tokens taken as computed, {restored['pulled_bytes']:,} bytes pulled, "
        seen += f"{restored['values_computed']} state values proven"
        outcomes.append(Outcome("a fresh process takes the state at T and computes none of it", cached == boundary, seen))
        equal = done["tokens"] == full["tokens"][made:]
        outcomes.append(Outcome("the continuation has the same tokens", equal, f"{len(done['tokens'])} tokens"))
        bits = done["scores"] == full["scores"][made:]
        outcomes.append(Outcome("and the same log-probabilities, bit for bit", bits, f"{len(done['scores'])} numbers"))
        outcomes += _forks(engine, tokens, boundary, full, made)
        outcomes += _said(kind, host)
        if kind == "hybrid":
            outcomes.append(_unchanged(host, f"{reference}:mid", restored))
    finally:
        engine.stop()
        proxy.close()
    return outcomes


def _forks(engine: Engine, tokens: list[int], boundary: int, full: dict[str, Any], made: int) -> list[Outcome]:
    """More requests with the same tokens: vLLM has their first blocks in its cache now."""
    exact, cached = 0, []
    expected = slice(made, made + FORK_STEPS)
    for number in range(FORKS):
        engine.send(tokens=tokens, count=FORK_STEPS, name=f"fork-{number}")
        done = engine.until("done")
        cached.append(done["cached"])
        exact += done["tokens"] == full["tokens"][expected] and done["scores"] == full["scores"][expected]
    taken = sorted(set(cached))
    return [
        Outcome(f"{REPLAY}: {FORKS} more requests take the state at T too", taken == [boundary], f"{taken} tokens taken as computed"),
        Outcome(f"{REPLAY}: each of them has the same log-probabilities, bit for bit", exact == FORKS, f"{exact} of {FORKS}"),
    ]


def _said(kind: str, host: Host) -> list[Outcome]:
    """What the agent lists of the requests above."""
    end = time.monotonic() + TOLD
    while True:
        info = host.engine(ENGINE) or {"staged": [], "restores": 0}
        said = {what: count for ready in info["staged"] for what, count in ready["outcomes"].items()}
        taken = said.get("taken", 0) + said.get("taken-on-kept", 0) == 1 + FORKS
        equal = said.get("logits-equal") == 1 + FORKS and "logits-differ" not in said
        if (taken and (equal or kind not in LOGITS)) or time.monotonic() > end:
            break
        time.sleep(0.2)
    if kind == SHARED:
        taken = taken and any(said.get(what) for what in ("taken-on-kept", "kept-differs"))
    found = [Outcome("pf engines says what became of each request", taken, f"{said}, {info['restores']} restores")]
    if kind in LOGITS:
        seen = f"{said.get('logits-equal', 0)} compared and equal, {said.get('logits-differ', 0)} differ"
        found.append(Outcome(f"{FIRST_STEP}: those of each restored request are the recorded ones", equal, seen))
    return found


def _unchanged(host: Host, reference: str, restored: dict[str, Any]) -> Outcome:
    """Each request above has overwritten the live slot that it got."""
    verified = host.pf("verify", reference)
    right = all(found["values_computed"] > 0 and not found["values_attested"] for found in (restored, verified))
    seen = f"{restored['values_computed']} values proven at the restore, {verified['values_computed']} in the registry afterwards"
    return Outcome(f"{APART}: after {1 + FORKS} continuations the stored values are those of the capture", right, seen)


def _recomputed(engine: Engine, proxy: Proxy, tokens: list[int]) -> Outcome:
    proxy.refuse_fill = True
    engine.send(tokens=tokens, count=10, name="not-filled")
    done = engine.until("done")
    proxy.refuse_fill = False
    right = len(done["tokens"]) == 10 and not done["cached"]
    return Outcome(
        f"{CLOSED}: blocks that could not be filled are computed, the engine lives", right, f"{done['cached']} tokens taken as computed"
    )


def _refused(host: Host, reference: str) -> Outcome:
    refused = host.refusal(ENGINE, reference)
    right = refused is not None and refused.code in ("missing_state", "missing_group")
    return Outcome(f"{CLOSED}: without its recurrent state the snapshot is refused", right, str(refused or "it was restored")[:160])


def _others(python: str, host: Host, folder: Path, args: list[str], reference: str) -> Outcome:
    """An engine with the same files of configuration, another rope, and other weights."""
    note("dense: starting a vLLM with other weights and an override")
    other = write_model(python, folder / "other", "dense", seed=2)
    override = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    changed = [other if arg == args[1] else arg for arg in args] + ["--overrides", override]
    engine = Engine(python, "vllm_host.py", host.folder / "other", [*changed, "--socket", str(host.engines)])
    try:
        engine.until("ready")
        host.wait_ready(ENGINE, engine)
        refused = host.refusal(ENGINE, reference)
    finally:
        engine.stop()
    right = refused is not None and refused.code == "fingerprint_mismatch" and all(w in str(refused) for w in ("model_config", "weights"))
    return Outcome(f"{CLOSED}: --hf-overrides and other weights are refused by name", right, str(refused or "it was restored")[-160:])


def _adapters(python: str, binaries: Path, folder: Path, registry: Registry, args: list[str]) -> list[Outcome]:
    """Two adapters of one name: what one computed is not the other's."""
    one, two = (write_model(python, folder / name, "adapter", seed) for seed, name in ((1, "one"), (2, "two")))
    copy = shutil.copytree(one, folder / "copy")
    random.seed(7)
    prompt = [random.randrange(1, 500) for _ in range(PROMPT)]
    reference = f"{registry.url}/real/adapters:mid"
    host = Host("host A", binaries, folder / "a", registry.url)
    try:
        engine = Engine(python, "vllm_host.py", host.folder / "engine", [*args, "--adapters", "--socket", str(host.engines)])
        try:
            engine.until("ready")
            host.wait_ready(ENGINE, engine)
            note("adapters: generating with one, captured")
            engine.send(tokens=prompt, count=STEPS, name="captured", adapter=["sql", 1, one])
            engine.until("progress", lambda e: e["tokens"] >= CAPTURE_AFTER)
            report = host.pf("snapshot", ENGINE, reference, "--push", "wait")
            full = engine.until("done")
            host.pf("restore", reference, ENGINE)
            tokens = (prompt + full["tokens"])[: report["boundary"] + 1]
            made = len(tokens) - len(prompt)
            note("adapters: continuing with another of the same name, then with a copy of another name")
            engine.send(tokens=tokens, count=STEPS - made, name="other", adapter=["sql", 2, two])
            other = engine.until("done")
            engine.send(tokens=tokens, count=STEPS - made, name="same", adapter=["renamed", 3, str(copy)])
            same = engine.until("done")
        finally:
            engine.stop()
    finally:
        host.stop()
    equal = same["cached"] == report["boundary"] and same["tokens"] == full["tokens"][made:] and same["scores"] == full["scores"][made:]
    return [
        Outcome(
            f"{CLOSED}: an adapter of the same name and other weights gets no state",
            not other["cached"],
            f"{other['cached']} tokens taken as computed",
        ),
        Outcome("a copy of the adapter under another name continues bit for bit", equal, f"{same['cached']} tokens taken as computed"),
    ]
