"""The connector's own settings: `kv_connector_extra_config` in `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .automatic import Auto

TEXTS = ("engine", "socket", "weights")
NUMBERS = ("patience", "later_limit", "fill_limit", "hold_limit", "keep", "keep_share")
"""Limits, in seconds; `keep_share` is a share."""
OBJECTS = ("auto",)


def check(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, without those that are null. Every process of the engine checks them.

    Raises `ValueError` for an unknown name: the engine does not start, where a misspelled limit
    would have no effect and no message. The same for a limit that is no number.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(found.keys() - {*TEXTS, *NUMBERS, *OBJECTS}):
        known = ", ".join((*TEXTS, *NUMBERS, *OBJECTS))
        raise ValueError(f"kv_connector_extra_config: no setting {', '.join(map(repr, unknown))}; there are {known}")
    for name in found.keys() & set(NUMBERS):
        try:
            float(found[name])
        except (TypeError, ValueError):
            raise ValueError(f"kv_connector_extra_config: {name} is a number, not {found[name]!r}") from None
    try:
        Auto.of(found.get("auto"))
    except ValueError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None
    return found
