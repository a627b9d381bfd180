"""The connector for vLLM.

    KVTransferConfig(
        kv_connector="PfConnector", kv_connector_module_path="pf_connector.vllm", kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"engine": "vllm-0", "socket": "/run/user/1000/pf/engines.sock"})

The scheduler's half holds blocks for captures, asks for state, and does what requests want
(`wishes`); each worker hands over its memory, copies what the next step overwrites, and has blocks
filled. vLLM is never paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import PfConnector

__all__ = ["PfConnector"]


def __getattr__(name: str) -> Any:
    # Modules that are imported from here need neither vLLM nor torch.
    if name == "PfConnector":
        from . import interface

        interface.check()
        from .connector import PfConnector

        return PfConnector
    raise AttributeError(name)
