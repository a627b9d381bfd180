"""What must be equal for a restore into SGLang, read from its options and its `ModelConfig`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pf_connector import identity as identities
from pf_connector.identity import Unidentified
from pf_connector.once import once

_SETTINGS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mm_attention_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "fp8_gemm_runner_backend",
    "mamba_ssm_dtype",
    "mamba_backend",
    "linear_attn_backend",
    "enable_fp32_lm_head",
    "enable_dp_attention",
    "disable_custom_all_reduce",
    "triton_attention_reduce_in_fp32",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_eagle_topk",
)
"""Options of the server that change results beyond the model's own configuration. Options that
this version lacks are left out."""


@dataclass(frozen=True)
class Identity:
    """The engine's name on this host, the agent's socket, and what must be equal for a restore."""

    engine: str
    socket: str
    tag: str
    """Names the encoding of pages: version, and the backends that write them."""
    deployment: dict[str, Any]
    """What is known at once."""
    computed: Callable[[], dict[str, Any]] = dict
    """All of it. Reading the weights may take minutes, so it is asked for in a member's thread."""

    def prepare(self) -> dict[str, Any]:
        """What completes a registration (`Member`). Raises `Failure` if the weights cannot be
        identified."""
        return {"deployment": self.deployment | self.computed()}


def options() -> Any:
    """SGLang's options as it has resolved them. `ServerArgs` itself holds what the user gave:
    `auto`, or nothing."""
    from sglang.srt.runtime_context import get_context

    return SimpleNamespace(**get_context().resolved_server_args_dict())


def identity(args: Any, model_config: Any, settings: dict[str, Any], socket: str) -> Identity:
    """Of resolved options, a `ModelConfig`, and the connector's settings."""
    import sglang

    engine = str(settings.get("engine") or "sglang")
    if int(args.dp_size) > 1:
        # Each replica has a cache of its own.
        from sglang.srt.runtime_context import get_parallel

        engine = f"{engine}-dp{get_parallel().dp_rank}"
    rest = functools.partial(deployment, args, model_config, str(settings.get("weights") or ""))
    return Identity(engine, socket, f"sglang-{sglang.__version__}/{args.attention_backend or 'auto'}", {}, once(rest))


def deployment(server_args: Any, model_config: Any, weights: str = "") -> dict[str, Any]:
    """The deployment of a registration, the same in every rank. `weights` is the digest that is
    expected.

    Reads the weights once, which may take minutes (`Member`'s `prepare` runs in a thread).
    Raises `Unidentified`.
    """
    import sglang

    settings = {name: value for name in _SETTINGS if (value := getattr(server_args, name, None)) is not None}
    graphs = _graphs(server_args)
    found: dict[str, Any] = {
        "weights": _weights(server_args, weights),
        "model_config": identities.configuration(model_config.hf_config.to_dict(), settings),
        "engine": f"sglang/{sglang.__version__}",
        "backend": _backend(server_args),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(server_args.kv_cache_dtype),
        "quantization": str(server_args.quantization or "none"),
        "deterministic": bool(server_args.enable_deterministic_inference),
        "graphs": "captured" if graphs is not None else "eager",
        "tp": int(server_args.tp_size),
        "pp": int(server_args.pp_size),
        "ep": int(server_args.ep_size),
    }
    if graphs is not None:
        found["graph_buckets"] = sorted(int(size) for size in graphs)
    return found


def _graphs(server_args: Any) -> Sequence[int] | None:
    """Batch sizes for which a step's graph is captured; `None` if none is."""
    phase = server_args.cuda_graph_config["decode"]
    return None if phase["backend"] == "disabled" else tuple(phase.get("bs") or ())


def _weights(server_args: Any, given: str) -> str:
    name = str(server_args.model_path)
    if server_args.load_format == "dummy":
        return identities.expected("dummy", given, "the weights")
    if Path(name).exists():
        return identities.weights(name, given, code=bool(server_args.trust_remote_code))
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, revision=server_args.revision, cache_dir=server_args.download_dir, local_files_only=True)
    except Exception as error:
        raise Unidentified(f"the weights of {name} are not in a folder here: {error}") from error
    return identities.weights(folder, given, code=bool(server_args.trust_remote_code))


def _backend(server_args: Any) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{server_args.attention_backend or 'auto'}/{device}/torch-{torch.__version__}"
