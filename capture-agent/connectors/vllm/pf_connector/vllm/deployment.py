"""The identity of an engine: settings that are the same in each of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pf_connector.paths import socket_path


@dataclass(frozen=True)
class Identity:
    """The engine's name on this host, the agent's socket, and what must be equal for a restore."""

    engine: str
    socket: str
    world: int
    deployment: dict[str, Any]


def identity(vllm_config: Any) -> Identity:
    """Reads a `VllmConfig` and the connector's own settings (`kv_connector_extra_config`)."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    parallel = vllm_config.parallel_config
    engine = str(extra.get("engine") or "vllm")
    if getattr(parallel, "data_parallel_size", 1) > 1:
        # Each replica has caches of its own.
        engine = f"{engine}-dp{parallel.data_parallel_rank}"
    return Identity(engine, socket_path(extra.get("socket")), int(parallel.world_size), deployment(vllm_config, extra))


def deployment(vllm_config: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a restore.

    Only settings that every process of the engine sees alike: the agent refuses members that
    differ. What workers resolve themselves (attention backend, block sizes, cache layout) is in the
    layout of the groups.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    lora = getattr(vllm_config, "lora_config", None)
    speculative = getattr(vllm_config, "speculative_config", None)
    found: dict[str, Any] = {
        "weights": str(extra.get("weights") or f"name:{model.model}@{getattr(model, 'revision', None) or ''}"),
        "engine": f"vllm/{_version()}",
        "backend": _backend(vllm_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization or "none"),
        "deterministic": os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        "graphs": "eager" if model.enforce_eager else "captured",
        "tp": int(parallel.tensor_parallel_size),
        "pp": int(parallel.pipeline_parallel_size),
    }
    if not model.enforce_eager:
        sizes = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or []
        found["graph_buckets"] = sorted(int(size) for size in sizes)
    if lora is not None:
        found["lora_rank"] = int(lora.max_lora_rank)
    if speculative is not None:
        found["speculation"] = f"{speculative.method}/{speculative.num_speculative_tokens}"
    return found


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _backend(vllm_config: Any) -> str:
    """The configured attention backend and the kind of device.

    With the version, they decide which backend `auto` selects.
    """
    import torch
    from vllm.platforms import current_platform

    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    name = getattr(chosen, "name", None) or str(chosen or "auto")
    if current_platform.is_cpu():
        device = f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    else:
        device = f"{current_platform.device_type}/{current_platform.get_device_name()}"
    return f"{name}/{device}"
