"""The identity of an engine: settings that are the same in each of its processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pf_connector import settings
from pf_connector.once import once
from pf_connector.paths import socket_path

from .automatic import OBJECTS
from .model import model_config, model_weights
from .shares import Shares


@dataclass(frozen=True)
class Identity:
    """The engine's name on this host, the agent's socket, and what must be equal for a restore."""

    engine: str
    socket: str
    world: int
    deployment: dict[str, Any]
    """What is known at once."""
    computed: Callable[[], dict[str, Any]] = dict
    """The rest of the deployment. Reading the weights may take minutes, so it is asked for in a
    member's thread."""
    shares: Shares = field(default_factory=Shares)
    """How ranks share the caches."""

    def prepare(self) -> dict[str, Any]:
        """What completes a registration (`Member`). Raises `Failure` if weights or configuration
        cannot be identified."""
        return {"deployment": self.deployment | self.computed()}


def identity(vllm_config: Any) -> Identity:
    """Reads a `VllmConfig` and the connector's own settings (`kv_connector_extra_config`)."""
    transfer = vllm_config.kv_transfer_config
    extra = settings.check(transfer.kv_connector_extra_config or {}, "kv_connector_extra_config", OBJECTS)
    parallel = vllm_config.parallel_config
    engine = str(extra.get("engine") or "vllm")
    if (number := replica(parallel, str(getattr(transfer, "engine_id", "")))) is not None:
        # Each replica has caches of its own.
        engine = f"{engine}-dp{number}"
    rest = functools.partial(_computed, vllm_config, str(extra.get("weights") or ""))
    return Identity(
        engine, socket_path(extra.get("socket")), int(parallel.world_size), deployment(vllm_config), once(rest), Shares.of(vllm_config)
    )


def replica(parallel: Any, engine_id: str) -> int | None:
    """The number of this replica of data parallelism; none if the engine is the only one.

    A replica of a dense model gets a configuration as if it were alone: a size of 1, and rank 0.
    vLLM keeps its number in `data_parallel_index`, and appends it to `engine_id`. Of the first
    replica only the latter shows that there are others.
    """
    number = int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)))
    several = getattr(parallel, "data_parallel_size", 1) > 1 or number > 0 or engine_id.endswith(f"_dp{number}")
    return number if several else None


def deployment(vllm_config: Any) -> dict[str, Any]:
    """What must be equal for a restore and is known at once.

    Only settings that every process of the engine sees alike: the agent refuses members that
    differ. The layout of the groups has what workers resolve themselves (attention backend,
    block sizes, cache layout).
    """
    import torch

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    lora = getattr(vllm_config, "lora_config", None)
    speculative = getattr(vllm_config, "speculative_config", None)
    found: dict[str, Any] = {
        "engine": f"vllm/{_version()}",
        "backend": _backend(vllm_config),
        "torch": str(torch.__version__),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization or "none"),
        "deterministic": os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        "graphs": "eager" if model.enforce_eager else "captured",
        "tp": int(parallel.tensor_parallel_size),
        "pp": int(parallel.pipeline_parallel_size),
    }
    if getattr(parallel, "enable_expert_parallel", False):
        # Experts are spread over all replicas, and sums over them with it.
        found["ep"] = int(parallel.tensor_parallel_size) * int(getattr(parallel, "data_parallel_size", 1))
    if not model.enforce_eager:
        sizes = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or []
        found["graph_buckets"] = sorted(int(size) for size in sizes)
    if lora is not None:
        found["lora_rank"] = int(lora.max_lora_rank)
    if speculative is not None:
        found["speculation"] = f"{speculative.method}/{speculative.num_speculative_tokens}"
    return found


def _computed(vllm_config: Any, given: str) -> dict[str, Any]:
    """Digests of configurations and weights: of the model, and of a draft model if there is one."""
    model = vllm_config.model_config
    found = {
        "model_config": model_config(vllm_config, model),
        "weights": model_weights(model, vllm_config.load_config, given),
    }
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        found["draft_config"] = model_config(vllm_config, draft)
        found["draft_weights"] = model_weights(draft, vllm_config.load_config, "")
    return found


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _backend(vllm_config: Any) -> str:
    """The configured attention backend and the kind of device: with the version they decide what
    `auto` becomes."""
    import torch
    from vllm.platforms import current_platform

    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    name = getattr(chosen, "name", None) or str(chosen or "auto")
    if current_platform.is_cpu():
        device = f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    else:
        device = f"{current_platform.device_type}/{current_platform.get_device_name()}"
    return f"{name}/{device}"
