"""Captures five families of hybrid models in the middle of a generation.

A new process on another host continues each of them.
"""

from __future__ import annotations

from pathlib import Path

from outcome import Outcome
from processes import Engine, Host, Registry, fresh, note
from proxy import Proxy

FAMILIES = ("qwen3-next", "qwen3.5", "bamba", "falcon-h1", "jamba")
ENGINE = "hf-0"
PROMPT = list(range(3, 40))
BEFORE, AFTER = 9, 24


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Checks all families with one registry and two hosts."""
    fresh(folder)
    registry = Registry(binaries, folder / "registry")
    a = Host("host A", binaries, folder / "a", registry.url)
    b = Host("host B", binaries, folder / "b", registry.url)
    try:
        return [one for family in FAMILIES for one in _family(family, python, a, b, f"{registry.url}/real/{family}")]
    finally:
        for child in (a, b, registry):
            child.stop()


def _family(family: str, python: str, a: Host, b: Host, reference: str) -> list[Outcome]:
    note(f"transformers: {family}")
    socket = a.folder / f"{family}.sock"
    proxy = Proxy(socket, a.engines)
    args = ["--family", family, "--engine", ENGINE, "--socket"]
    engine = Engine(python, "transformers_host.py", a.folder / family, [*args, str(socket)])
    try:
        engine.until("ready")
        a.wait_ready(ENGINE, engine)
        engine.send(name="chat", tokens=PROMPT, count=BEFORE)
        before = engine.until("done")
        report = a.pf("snapshot", ENGINE, f"{reference}:mid", "--push", "wait", "--exact")
        proxy.omit = "state"
        proxy.cut()
        a.wait_ready(ENGINE, engine, lambda info: "state" not in info["groups"])
        a.pf("snapshot", ENGINE, f"{reference}:stateless", "--push", "wait")
        engine.send(name="chat", count=AFTER)
        full = engine.until("done")
    finally:
        engine.stop()
        proxy.close()
    engine = Engine(python, "transformers_host.py", b.folder / family, [*args, str(b.engines)])
    try:
        engine.until("ready")
        b.wait_ready(ENGINE, engine)
        refused = _refused(b, f"{reference}:stateless", family)
        restored = b.pf("restore", f"{reference}:mid", ENGINE)
        engine.send(name="restored", count=AFTER)
        done = engine.until("done")
    finally:
        engine.stop()
    boundary = len(PROMPT) + BEFORE - 1
    right = restored["boundary"] == report["boundary"] == boundary and before["computed"] == boundary
    equal = done["tokens"] == full["tokens"] and done["logits"] == full["logits"]
    seen = (
        f"T={boundary}, {len(done['tokens'])} tokens; {report['state_bytes']:,} bytes of state, "
        f"{restored['values_computed']} values checked, "
        f"logits {'compared' if restored['oracle'] else 'not compared'}, {report['exactness']}"
    )
    return [Outcome(f"{family}: a fresh process continues with the same logits, bit for bit", right and equal, seen), refused]


def _refused(host: Host, reference: str, family: str) -> Outcome:
    refused = host.refusal(ENGINE, reference)
    right = refused is not None and refused.code in ("missing_state", "missing_group")
    return Outcome(f"{family}: without its state the snapshot is refused", right, str(refused or "it was restored")[:160])
