"""What must be equal for a restore into SGLang, read from its `ServerArgs` and `ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pf_connector import identity
from pf_connector.identity import Unidentified

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


def deployment(server_args: Any, model_config: Any, weights: str = "") -> dict[str, Any]:
    """The deployment of a registration, the same in every rank. `weights` is the digest that is
    expected.

    Reads the weights once, which may take minutes (`Member`'s `prepare` runs in a thread).
    Raises `Unidentified`.
    """
    import sglang

    settings = {name: value for name in _SETTINGS if (value := getattr(server_args, name, None)) is not None}
    graphs = not server_args.disable_cuda_graph
    found: dict[str, Any] = {
        "weights": _weights(server_args, weights),
        "model_config": identity.configuration(model_config.hf_config.to_dict(), settings),
        "engine": f"sglang/{sglang.__version__}",
        "backend": _backend(server_args),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(server_args.kv_cache_dtype),
        "quantization": str(server_args.quantization or "none"),
        "deterministic": bool(server_args.enable_deterministic_inference),
        "graphs": "captured" if graphs else "eager",
        "tp": int(server_args.tp_size),
        "pp": int(server_args.pp_size),
        "ep": int(server_args.ep_size),
    }
    if graphs:
        found["graph_buckets"] = sorted(int(size) for size in server_args.cuda_graph_bs or ())
    return found


def _weights(server_args: Any, given: str) -> str:
    name = str(server_args.model_path)
    if server_args.load_format == "dummy":
        return identity.expected("dummy", given, "the weights")
    if Path(name).exists():
        return identity.weights(name, given, code=bool(server_args.trust_remote_code))
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, revision=server_args.revision, cache_dir=server_args.download_dir, local_files_only=True)
    except Exception as error:
        raise Unidentified(f"the weights of {name} are not in a folder here: {error}") from error
    return identity.weights(folder, given, code=bool(server_args.trust_remote_code))


def _backend(server_args: Any) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{server_args.attention_backend or 'auto'}/{device}/torch-{torch.__version__}"
