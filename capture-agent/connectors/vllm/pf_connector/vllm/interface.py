"""Whether this vLLM has what the connector uses. vLLM calls its connector interface
experimental, and changes it."""

from __future__ import annotations

import importlib
import logging
import re

from pf_connector import __version__

log = logging.getLogger("pf_connector")

OLDEST, NEWEST = (0, 32), (0, 33)
"""Versions that the connector is written for, both included."""

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_NAMES = {
    _BASE: (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    "vllm.v1.request": ("RequestStatus",),
    "vllm.v1.kv_cache_interface": ("get_kv_cache_spec_kind",),
    "vllm.transformers_utils.config": ("get_config",),
    "vllm.platforms": ("current_platform",),
}
_HOOKS = (
    "bind_kv_cache_manager",
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "on_new_request",
    "register_kv_caches",
    "request_finished",
    "start_load_kv",
    "update_state_after_alloc",
)
"""Methods that vLLM must call. One that it does not know would never run, without any message."""


class Incompatible(ImportError):
    """This vLLM lacks something; says what, and which versions have it."""


def check() -> None:
    """Raises `Incompatible`. Only warns of a version that has everything and was never tried."""
    import vllm

    version = str(vllm.__version__)
    lacking = []
    for module, names in _NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            lacking.append(module)
            continue
        lacking += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    if _BASE not in lacking:
        base = getattr(importlib.import_module(_BASE), "KVConnectorBase_V1", None)
        lacking += [f"KVConnectorBase_V1.{hook}" for hook in _HOOKS if base is not None and not hasattr(base, hook)]
    if lacking:
        what = ", ".join(lacking)
        raise Incompatible(f"pf-connector {__version__} is for vLLM {_versions()}; this is vLLM {version}, which lacks {what}")
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or not OLDEST <= (int(number[1]), int(number[2])) <= NEWEST:
        log.warning("pf-connector %s is for vLLM %s and was never run with %s", __version__, _versions(), version)


def _versions() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
