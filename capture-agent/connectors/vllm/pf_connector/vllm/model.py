"""Which model vLLM runs: its configuration after all overrides, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pf_connector import identity
from pf_connector.identity import Unidentified

from .first_step import CLASS

log = logging.getLogger("pf_connector")

_SETTINGS = (
    "model.disable_sliding_window",
    "model.disable_cascade_attn",
    "model.model_impl",
    "model.override_attention_dtype",
    "model.logits_processors",
    "parallel_config.disable_custom_all_reduce",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.prefill_context_parallel_size",
    "parallel_config.all2all_backend",
    "parallel_config.enable_eplb",
    "cache_config.calculate_kv_scales",
    "cache_config.kv_sharing_fast_prefill",
    "cache_config.mamba_cache_dtype",
    "cache_config.mamba_ssm_cache_dtype",
    "compilation_config.mode",
    "compilation_config.custom_ops",
)
"""What vLLM's options change in results beyond the model's own configuration. Options that this
version lacks are left out. Seeds are not here: with given weights they decide sampling only,
which is recorded or named."""
_UNREAD = ("tensorizer", "runai_streamer", "runai_streamer_sharded", "instanttensor", "fastsafetensors_remote")
"""Formats whose weights do not lie in a folder of this host."""
_KINDS = {"pt": ("*.pt",), "npcache": ("*.bin",), "mistral": ("consolidated*.safetensors",)}
"""Files that a format loads, where these are not the usual ones."""


def model_config(vllm_config: Any, model: Any) -> str:
    """Digest of the configuration that `model`, a `ModelConfig`, has after its overrides, and of
    vLLM's options. Raises `Unidentified`."""
    config = _resolved(model)
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        owner, field = name.split(".")
        value = getattr(model if owner == "model" else getattr(vllm_config, owner, None), field, None)
        if field == "logits_processors":
            # Ours changes nothing.
            value = [str(one) for one in value or () if str(one) != CLASS] or None
        if value is not None:
            settings[name] = value
    if _has_long_rope(config):
        # The longest context chooses between two sets of factors.
        settings["max_model_len"] = int(model.max_model_len)
    return identity.configuration(config, settings)


def _resolved(model: Any) -> dict[str, Any]:
    """The configuration as vLLM resolves it when it starts, read once more.

    The object in `ModelConfig` will not do. Models write to it while weights are loaded
    (DeepSeek its type of rope), and that happens in workers only: members of one engine would
    differ.
    """
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides or {}
    function: Callable[[Any], Any] | None = overrides if callable(overrides) else None
    given: dict[str, Any] = {} if function else dict(overrides)
    # vLLM passes single values to the configuration's constructor, and sets objects afterwards.
    nested = {key: value for key, value in given.items() if isinstance(value, dict)}
    single = {key: value for key, value in given.items() if key not in nested}
    options = {"token": model.hf_token} if getattr(model, "hf_token", None) else {}
    config = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw=single,
        hf_overrides_fn=function,
        **options,
    )
    found: dict[str, Any] = identity.plain(config.to_dict(), "model")
    for key, value in nested.items():
        inside = hasattr(getattr(config, key, None), "to_dict") and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if inside else identity.plain(value, key)
    return found


def _merged(base: dict[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with overrides of a nested configuration: objects are merged, everything else is
    replaced."""
    found = dict(base)
    for key, value in updates.items():
        into = isinstance(value, Mapping) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if into else identity.plain(value, key)
    return found


def _has_long_rope(value: Any) -> bool:
    if isinstance(value, dict):
        kinds = (value.get("rope_type"), value.get("type"))
        return any(kind in ("longrope", "su") for kind in kinds) or any(_has_long_rope(inner) for inner in value.values())
    return isinstance(value, list) and any(_has_long_rope(inner) for inner in value)


def model_weights(model: Any, load: Any, given: str) -> str:
    """Digest of the weights that vLLM loads for `model`. Raises `Unidentified` if they cannot be
    read, or are not those given."""
    form = str(getattr(load.load_format, "value", load.load_format))
    if form == "dummy":
        # Made up from shapes with a fixed seed.
        return identity.expected("dummy", given, "the weights")
    place = None if form in _UNREAD else _place(model, load)
    if place is None:
        if not given:
            raise Unidentified(f"the weights of {model.model} (format {form}) are not in a folder here: set `weights` to a name for them")
        log.warning("weights: %s are not in a folder here, so %r is taken on trust", model.model, given)
        # Never equal to a computed digest.
        return f"attested:{given}"
    return identity.weights(place, given, code=bool(model.trust_remote_code), kinds=_KINDS.get(form, identity.KINDS))


def _place(model: Any, load: Any) -> Path | None:
    """The folder or file of a model's weights on this host."""
    name = str(getattr(model, "model_weights", None) or model.model)
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        folder = load.download_dir
        return Path(snapshot_download(name, revision=model.revision, cache_dir=folder, local_files_only=True))
    except Exception as error:
        log.info("weights: %s is not in the hub's cache: %s", name, error)
        return None
