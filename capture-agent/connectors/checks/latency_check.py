"""What the connector costs the tokens of a real vLLM server: while it is idle, and while the agent
captures.

It prints times and fails for none of them: they depend on the machine. Two servers run, one without
connector; only one of them works at a time. Each round has every way twice, in the order A B B A,
so that a drift of the machine affects both alike. Each round gives one ratio; the table has the
median over all rounds, with an interval that has the true median in 19 of 20 cases.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcome import Outcome
from processes import PROCESSORS, Host, Registry, Server, fresh, note
from streams import Stream
from vllm_check import write_model

from pf_connector.agent import Refused, request

ENGINE = "vllm-0"
ROUNDS = int(os.environ.get("PF_LATENCY_ROUNDS", "20"))
PROMPT = 64
LONG = 600
"""Tokens of a prompt that is captured: some of its blocks are new in each run."""
TOKENS = 200
CAPTURE_AT = 60
"""Tokens of a run after which its capture begins."""
SETTLE = 1.5
"""Seconds between runs: vLLM's processes look for work without pause for a second."""
ARGS = ["--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8"]
ARGS += ["--block-size", "32", "--seed", "0"]


@dataclass
class Run:
    """One request: seconds between its tokens, and of processors for each token."""

    gaps: list[float]
    cpu: float
    agent: float
    during: list[float] = field(default_factory=list)
    """The gaps in which a capture ran."""
    captures: int = 0
    seconds: float = 0.0
    """Of all captures."""

    @property
    def middle(self) -> float:
        return statistics.median(self.gaps)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.gaps)


class _Check:
    def __init__(self, plain: Server, server: Server, host: Host) -> None:
        self.plain, self.server, self.host = plain, server, host
        self.random = random.Random(7)
        self.number = 0

    def run(self, server: Server, prompt: int, capture: Callable[[Stream], tuple[int, float, float]] | None = None) -> Run:
        """A request with a prompt of its own, so that vLLM has none of it. `capture` answers
        number, begin and end."""
        time.sleep(SETTLE)
        tokens = [self.random.randrange(1, 500) for _ in range(prompt)]
        cpu, agent = _cpu(server.process.pid), _cpu(self.host.agent.process.pid, session=False)
        stream = Stream(server, tokens, TOKENS)
        captures, begun, ended = capture(stream) if capture is not None else (0, 0.0, 0.0)
        stream.done()
        times = [at for at, _ in stream.came]
        if len(times) != TOKENS:
            raise AssertionError(f"{len(times)} tokens came, expected {TOKENS}")
        # Not the first ones: the prompt.
        gaps = [(after, after - before) for before, after in zip(times[5:], times[6:], strict=False)]
        during = [gap for after, gap in gaps if begun < after and after - gap < ended]
        spent, by_agent = _cpu(server.process.pid) - cpu, _cpu(self.host.agent.process.pid, session=False) - agent
        return Run([gap for _, gap in gaps], spent / TOKENS, by_agent, during, captures, ended - begun)

    def capture(self, stream: Stream) -> None:
        self.number += 1
        body = {"reference": f"bench/latency:c{self.number}", "push": "never", "oracle": 0}
        asked, came = time.monotonic(), len(stream.came)
        try:
            request(str(self.host.control), "POST", f"/v1/engines/{ENGINE}/snapshots", body)
        except Refused as error:
            after = f"after {time.monotonic() - asked:.3f} s; {came} tokens had come then, {len(stream.came)} now"
            raise AssertionError(f"the capture was refused {after}: {error}") from error

    def once(self, stream: Stream) -> tuple[int, float, float]:
        """One capture in the middle of a run."""
        stream.reach(CAPTURE_AT)
        begun = time.monotonic()
        self.capture(stream)
        return 1, begun, time.monotonic()

    def always(self, stream: Stream) -> tuple[int, float, float]:
        """One capture after another, from the first token almost to the last."""
        stream.reach(CAPTURE_AT)
        begun, count = time.monotonic(), 0
        while len(stream.came) < TOKENS - 50:
            self.capture(stream)
            count += 1
        return count, begun, time.monotonic()

    def compare(self, what: str, one: Callable[[], Run], other: Callable[[], Run]) -> list[tuple[list[Run], list[Run]]]:
        """Rounds of both ways."""
        rounds = []
        for number in range(ROUNDS):
            note(f"latency: {what}, round {number + 1} of {ROUNDS}")
            first, second, third, fourth = one(), other(), other(), one()
            rounds.append(([first, fourth], [second, third]))
        print("\n" + table([row(what, rounds, during=bool(rounds[0][1][0].during))]), flush=True)
        return rounds


def check(python: str, binaries: Path, folder: Path) -> list[Outcome]:
    """Measures, prints a table and JSON."""
    fresh(folder)
    model = write_model(python, folder / "model", "large")
    registry = Registry(binaries, folder / "registry")
    host = Host("host A", binaries, folder / "a", registry.url)
    note("latency: starting two OpenAI servers, one without connector")
    plain = Server(python, folder / "plain", model, None, host.engines, ARGS, PROCESSORS)
    server = Server(python, folder / "server", model, ENGINE, host.engines, ARGS, PROCESSORS)
    try:
        plain.wait_ready()
        server.wait_ready()
        host.wait_ready(ENGINE, server)
        return _measure(_Check(plain, server, host))
    finally:
        for child in (plain, server, host, registry):
            child.stop()


def _measure(check: _Check) -> list[Outcome]:
    for server in (check.plain, check.server):
        for prompt in (PROMPT, LONG):
            check.run(server, prompt)
    check.run(check.server, LONG, check.once)
    idle = check.compare("idle", lambda: check.run(check.plain, PROMPT), lambda: check.run(check.server, PROMPT))
    once = check.compare("one capture", lambda: check.run(check.server, LONG), lambda: check.run(check.server, LONG, check.once))
    always = check.compare("captures", lambda: check.run(check.server, LONG), lambda: check.run(check.server, LONG, check.always))
    rows = [
        # What the order and the machine do by themselves: the second plain run of a round against
        # its first.
        row("plain server against itself", [((one,), (two,)) for (one, two), _ in idle]),
        row("connector idle", idle),
        row("tokens while a capture runs", once, during=True),
        row("whole request with one capture", once),
        row("captures without a break", always, during=True),
    ]
    print("\n" + table(rows))
    print(json.dumps({"load": os.getloadavg(), "processors": os.cpu_count(), "rounds": ROUNDS, "tokens": TOKENS, "rows": rows}), flush=True)
    captured = all(run.captures == 1 and run.during for _, runs in once for run in runs) and all(
        run.captures for _, runs in always for run in runs
    )
    return [
        Outcome(
            "captures succeed while tokens come; the times are measured, not judged",
            captured,
            "; ".join(f"{one['what']}: × {one['median_gap']:.3f} ({one['interval'][0]:.3f}-{one['interval'][1]:.3f})" for one in rows),
        )
    ]


def row(what: str, rounds: Any, during: bool = False) -> dict[str, Any]:
    """Ratios of the second way to the first."""

    def gaps(runs: Any) -> list[float]:
        return [gap for run in runs for gap in (run.during if during else run.gaps)]

    ratios, means, cpus = [], [], []
    for one, other in rounds:
        base, found = [gap for run in one for gap in run.gaps], gaps(other)
        ratios.append(statistics.median(found) / statistics.median(base))
        means.append(statistics.fmean(found) / statistics.fmean(base))
        cpus.append(sum(run.cpu for run in other) / sum(run.cpu for run in one))
    all_other = [run for _, other in rounds for run in other]
    all_gaps = [gap for _, other in rounds for gap in gaps(other)]
    seen: dict[str, Any] = {
        "what": what,
        "base_gap_ms": 1000 * statistics.median(gap for one, _ in rounds for run in one for gap in run.gaps),
        "gap_ms": 1000 * statistics.median(all_gaps),
        "gap_p99_ms": 1000 * sorted(all_gaps)[int(len(all_gaps) * 0.99)],
        "median_gap": statistics.median(ratios),
        "interval": interval(ratios),
        "mean_gap": statistics.median(means),
        "mean_interval": interval(means),
        "cpu": statistics.median(cpus),
        "cpu_ms": 1000 * statistics.median(run.cpu for run in all_other),
        "gaps": len(all_gaps),
    }
    if captures := sum(run.captures for run in all_other):
        seen["captures"] = captures
        seen["capture_ms"] = 1000 * sum(run.seconds for run in all_other) / captures
        seen["agent_cpu_ms"] = 1000 * sum(run.agent for run in all_other) / captures
    return {name: [round(one, 4) for one in value] if isinstance(value, list) else value for name, value in seen.items()}


def interval(values: list[float]) -> list[float]:
    """Of the median, from the order of the values: it has the true one in 19 of 20 cases."""
    ordered, count = sorted(values), len(values)
    low, mass = 0, 0.0
    while low < count // 2 and (mass := mass + math.comb(count, low) / 2**count) <= 0.025:
        low += 1
    low = max(0, low - 1)
    return [ordered[low], ordered[count - 1 - low]]


def table(rows: list[dict[str, Any]]) -> str:
    """For a page."""
    lines = [
        "| | ms between tokens, without | with | p99 with | median × (95 %) | mean × (95 %) | server's CPU × |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        (low, high), (mean_low, mean_high) = one["interval"], one["mean_interval"]
        gaps = f"{one['base_gap_ms']:.2f} | {one['gap_ms']:.2f} | {one['gap_p99_ms']:.2f}"
        ratios = f"{one['median_gap']:.3f} ({low:.3f}–{high:.3f}) | {one['mean_gap']:.3f} ({mean_low:.3f}–{mean_high:.3f})"
        lines.append(f"| {one['what']} | {gaps} | {ratios} | {one['cpu']:.3f} |")
    return "\n".join(lines)


def _cpu(pid: int, session: bool = True) -> float:
    """Seconds of processors that a process, or its session, has used."""
    found = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[3]) == pid if session else int(entry.name) == pid:
            found += int(words[11]) + int(words[12])
    return found / os.sysconf("SC_CLK_TCK")
