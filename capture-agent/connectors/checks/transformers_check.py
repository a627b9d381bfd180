"""Captures five families of hybrid models in the middle of a generation.

A new process on another host continues each of them, several times. A second engine in that process
has slots of another form: it continues too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outcome import APART, CLOSED, FIRST_STEP, REPLAY, Outcome
from processes import Engine, Host, Registry, fresh, note
from proxy import Proxy

FAMILIES = ("qwen3-next", "qwen3.5", "bamba", "falcon-h1", "jamba")
ENGINE = "hf-0"
MIRRORED = "hf-mirrored"
REPLAYS = 3
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
    engine = Engine(python, "transformers_host.py", b.folder / family, [*args, str(b.engines), "--mirrored", MIRRORED])
    try:
        engine.until("ready")
        b.wait_ready(ENGINE, engine)
        b.wait_ready(MIRRORED, engine)
        refused = _refused(b, f"{reference}:stateless", family)
        restores, replays = [], []
        for number in range(REPLAYS):
            restores.append(b.pf("restore", f"{reference}:mid", ENGINE))
            engine.send(name=f"replay-{number}", count=AFTER)
            replays.append(engine.until("done"))
        restores.append(b.pf("restore", f"{reference}:mid", MIRRORED))
        b.pf("snapshot", MIRRORED, f"{reference}:mirrored", "--push", "wait")
        engine.send(name="mirrored", engine=MIRRORED, count=AFTER)
        mirrored = engine.until("done")
    finally:
        engine.stop()
    boundary = len(PROMPT) + BEFORE - 1
    first = restores[0]
    right = report["boundary"] == boundary == before["computed"] and all(one["boundary"] == boundary for one in restores)
    equal = [_same(one, full) for one in replays]
    seen = (
        f"T={boundary}, {sum(equal)} of {REPLAYS} equal over {AFTER} tokens; {report['state_bytes']:,} bytes of state, "
        f"{first['values_computed']} values checked, {report['exactness']}"
    )
    compared = [one["oracle"] for one in restores]
    return [
        Outcome(
            f"{family}: {REPLAY}: a fresh process continues {REPLAYS} times with the same logits, bit for bit", right and all(equal), seen
        ),
        Outcome(
            f"{family}: {FIRST_STEP}: each restore compares those of the pages with those of the live cache",
            report["oracle"] and all(compared),
            f"{sum(compared)} of {len(compared)} restores",
        ),
        refused,
        _apart(b, family, reference, restores[-1], _same(mirrored, full)),
    ]


def _same(done: dict[str, Any], full: dict[str, Any]) -> bool:
    return bool(done["tokens"] == full["tokens"] and done["logits"] == full["logits"])


def _apart(host: Host, family: str, reference: str, restored: dict[str, Any], equal: bool) -> Outcome:
    """The stored bytes, the value in the form of another engine's slots, and these slots."""
    stored, captured = (_tensors(host, family, f"{reference}:{tag}", tag) for tag in ("mid", "mirrored"))
    values, payloads = ({name: tensor[field] for name, tensor in stored.items()} for field in ("value_hash", "payload_hash"))
    same = values == {name: tensor["value_hash"] for name, tensor in captured.items()}
    other = all(captured[name]["payload_hash"] != payload for name, payload in payloads.items()) if same else False
    converted = {one["state"] for one in restored.get("converted", [])}
    # By now all slots have other values: their sequences have gone on.
    verified = host.pf("verify", f"{reference}:mid")
    whole = verified["values_computed"] > 0 and not verified["values_attested"]
    return Outcome(
        f"{family}: {APART}: slots of another layout and type get the same values",
        bool(values) and same and other and converted == set(values) and whole and equal,
        f"{len(converted)} of {len(values)} tensors converted; captured from there: value hashes {'equal' if same else 'differ'}, "
        f"payloads {'differ' if other else 'equal'}; logits {'equal' if equal else 'differ'}; "
        f"{verified['values_computed']} stored values as they were",
    )


def _tensors(host: Host, family: str, reference: str, tag: str) -> dict[str, Any]:
    """The state tensors of a snapshot's checkpoint, by name."""
    folder = host.folder / f"{family}-{tag}"
    host.pf("pull", reference, str(folder))
    return {tensor["name"]: tensor for tensor in json.loads((folder / "checkpoint.json").read_bytes())["tensors"]}


def _refused(host: Host, reference: str, family: str) -> Outcome:
    refused = host.refusal(ENGINE, reference)
    right = refused is not None and refused.code in ("missing_state", "missing_group")
    return Outcome(f"{family}: {CLOSED}: without its state the snapshot is refused", right, str(refused or "it was restored")[:160])
