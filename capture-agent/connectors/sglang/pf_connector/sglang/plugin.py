"""The plugin that SGLang loads: reads the settings, checks this SGLang, and registers the hooks.

SGLang logs the exception of a plugin and serves without it. An operator sets `PF_SGLANG` to have
captures. So a mistake in the settings, or an SGLang that does not fit, ends the process instead.
"""

from __future__ import annotations

import json
import os
from typing import Any

from pf_connector import settings

VARIABLE = "PF_SGLANG"
"""The environment variable with the connector's settings, a JSON object. Without it SGLang runs as
if the package were not installed."""


def load() -> None:
    """The entry point. Raises `SystemExit` if the settings are wrong, or if this SGLang lacks a
    method that the connector uses."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    try:
        given = read(text)
        from . import hooks, interface

        interface.check()
    except (ValueError, ImportError) as error:
        raise SystemExit(f"pf-connector: {error}") from error
    hooks.register(given)


def read(text: str) -> dict[str, Any]:
    """The settings in the JSON text of the variable. Raises `ValueError` if they are wrong."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{VARIABLE} must be a JSON object, such as {{}}")
    return settings.check(given, VARIABLE)
