"""The settings that a connector of a serving engine has: `kv_connector_extra_config` in vLLM's
`--kv-transfer-config`, `PF_SGLANG` for SGLang."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

TEXTS = ("engine", "socket", "weights")
SECONDS = ("answer_limit", "later_limit", "fill_limit", "hold_limit", "keep")
"""Limits, in seconds."""
SHARES = ("keep_share",)
"""Limits between 0 and 1."""
NUMBERS = (*SECONDS, *SHARES)


def check(given: Mapping[str, Any], place: str, objects: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})) -> dict[str, Any]:
    """The settings, without those that are null. Every process of the engine checks them. `place`
    says where the user gives them. `objects` are settings of one engine's connector, each with what
    checks its value.

    Raises `ValueError` for an unknown name: the engine does not start, where a misspelled limit
    would have no effect and no message. The same for a limit that is no number, or out of bounds.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(found.keys() - {*TEXTS, *NUMBERS, *objects}):
        known = ", ".join((*TEXTS, *NUMBERS, *objects))
        raise ValueError(f"{place}: no setting {', '.join(map(repr, unknown))}; there are {known}")
    for name in found.keys() & set(NUMBERS):
        try:
            value = float(found[name])
        except (TypeError, ValueError):
            raise ValueError(f"{place}: {name} is a number, not {found[name]!r}") from None
        if not (0 <= value <= 1 if name in SHARES else 0 <= value < math.inf):
            bounds = "a share between 0 and 1" if name in SHARES else "a number of seconds, not below 0"
            raise ValueError(f"{place}: {name} is {bounds}, not {found[name]!r}")
    for name, parse in objects.items():
        try:
            parse(found.get(name))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return found
