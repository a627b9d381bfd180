"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """One line of the table: what was claimed, whether it holds, what was seen."""

    claim: str
    holds: bool
    seen: str
