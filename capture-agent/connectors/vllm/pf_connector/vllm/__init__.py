"""The connector for vLLM.

    KVTransferConfig(
        kv_connector="PfConnector", kv_connector_module_path="pf_connector.vllm", kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"engine": "vllm-0", "socket": "/run/user/1000/pf/engines.sock"})

The scheduler's half serves page tables and asks for state; each worker hands over its memory and
has blocks filled; `control` pauses and resumes, from the process that has the `AsyncLLM` or beside
`vllm serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import PfConnector
    from .control import Control

__all__ = ["Control", "PfConnector"]


def __getattr__(name: str) -> Any:
    # The sidecar needs neither vLLM nor torch.
    if name == "PfConnector":
        from . import interface

        interface.check()
        from .connector import PfConnector

        return PfConnector
    if name == "Control":
        from .control import Control

        return Control
    raise AttributeError(name)
