"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """One line of the table: the claim, whether it holds, and what was measured."""

    claim: str
    holds: bool
    seen: str
