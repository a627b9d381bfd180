"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

REPLAY = "repeated exact replay"
FIRST_STEP = "stable first-step logits"
CLOSED = "fail closed"
APART = "payload, mirror and live state apart"
CRITERIA = (REPLAY, FIRST_STEP, CLOSED, APART)
"""The acceptance criteria of docs/checkpoint-abi.md. A claim that shows one has its name."""


@dataclass
class Outcome:
    """One line of the table: the claim, whether it holds, and what was measured."""

    claim: str
    holds: bool
    seen: str
