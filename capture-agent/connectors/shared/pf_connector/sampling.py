"""Sampling settings as a snapshot records them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def recorded(params: Any, names: Sequence[str]) -> dict[str, Any]:
    """Those of the named settings that are not the default of their class, in types that JSON
    has."""
    default, found = type(params)(), {}
    for name in names:
        value = getattr(params, name, None)
        if value is not None and value != getattr(default, name, None):
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    return value
