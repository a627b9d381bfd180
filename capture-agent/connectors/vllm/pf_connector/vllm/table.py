"""A running request: tokens, boundary, blocks, and what decides its next tokens."""

from __future__ import annotations

from typing import Any

from pf_connector.sampling import recorded
from pf_connector.tokens import Packed

from .adapters import UNIDENTIFIED, Adapters
from .first_step import MARK

_adapters = Adapters()

_RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
)
"""Sampling settings that a snapshot records if they are not the default."""


_OF_VLLM = {"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"}
"""Extra arguments that no logits processor reads."""


def sequence(request: Any, boundary: int, blocks: dict[str, list[int]]) -> dict[str, Any]:
    """The protocol's `Sequence` of a request at a token position. `blocks` are those with this
    state, by group and column."""
    described: dict[str, Any] = {
        "id": request.request_id,
        # The token at the position is chosen and not computed. The request may have gone on.
        "tokens": Packed.of(request.all_token_ids, boundary + 1),
        "boundary": boundary,
        "blocks": blocks,
        "salt": salt(request),
        "sampling": sampling(request),
        "unrecorded": unrecorded(request),
    }
    if digest := adapter(request):
        described["adapter"] = digest
        if digest.startswith(UNIDENTIFIED):
            described["unrecorded"].append("adapter")
    return described


def salt(request: Any) -> str:
    """The salt of the prefix key.

    Inputs that are not tokens are part of it, since two images have equal placeholder tokens.
    """
    words = [request.cache_salt or ""]
    for feature in getattr(request, "mm_features", None) or ():
        words.append(f"{feature.modality}:{feature.identifier}@{feature.mm_position.offset}")
    return "\n".join(words)


def adapter(request: Any) -> str | None:
    """Digest of the adapter in use. Waits while its files are read."""
    lora = request.lora_request
    return None if lora is None else _adapters.digest(lora)


def settled(request: Any) -> bool:
    """Whether `adapter` answers at once. Begins to read the files of an adapter that is new."""
    return request.lora_request is None or _adapters.settled(request.lora_request)


def matchable(request: Any) -> bool:
    """Whether tokens, salt and adapter identify this request's prefix."""
    return request.prompt_embeds is None and request.sampling_params is not None and not request.skip_reading_prefix_cache


def sampling(request: Any) -> dict[str, Any]:
    """Settings that are not the default, and where the prompt ended: penalties look at that."""
    params = request.sampling_params
    if params is None:
        return {}
    return {"prompt_tokens": int(request.num_prompt_tokens), **recorded(params, _RECORDED)}


def unrecorded(request: Any) -> list[str]:
    """Names of state that affects the next token and is neither in memory nor in `sampling`."""
    params, found = request.sampling_params, []
    if params is None or request.prompt_embeds is not None:
        found.append("embeddings")
    if params is not None:
        if params.temperature > 0:
            found.append("rng")
        if params.structured_outputs is not None:
            found.append("grammar")
        if params.presence_penalty or params.frequency_penalty:
            # They count generated tokens only; after a restore all are prompt.
            found.append("penalties")
        if set(params.extra_args or ()) - _OF_VLLM - {MARK} or getattr(params, "thinking_token_budget", None) is not None:
            found.append("logits-processors")
    if request.spec_token_ids:
        found.append("speculation")
    if getattr(request, "mm_features", None):
        found.append("multimodal")
    return found
