"""The paths of the capture agent's sockets."""

from __future__ import annotations

import os
from typing import Any


def socket_path(configured: Any = None) -> str:
    """The agent's socket for engines: configured, `PF_AGENT_ENGINE_SOCKET`, or the default."""
    return str(configured or os.environ.get("PF_AGENT_ENGINE_SOCKET") or _default("engines.sock"))


def _default(name: str) -> str:
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "pf", name)
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(data, "pf", "agent", name)
