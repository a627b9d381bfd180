"""Allocates all layers of SGLang's KV cache together, and describes the cache to the agent.

SGLang allocates each layer by itself. The agent needs all layers of a page in one memory. So
`create` puts the layers into one allocation, one after another. Within a layer, K and V keep the
shape, the strides and the distance that SGLang gives them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pf_connector.layout import Unsupported, add_dtype, dtype_name, part
from pf_connector.memory import Shared, share

log = logging.getLogger("pf_connector")

GROUP = "full-attention"
_MEMORY = "kv"


def create(original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs in place of `MHATokenToKVPool._create_buffers_normal`. SGLang allocates a pool that the
    connector does not support. Such a pool is not captured, and `describe` says why."""
    reason = _unsupported(pool)
    if reason is not None:
        log.warning("the KV cache will not be captured, and SGLang allocates it layer by layer: %s", reason)
        return original(pool, *args, **kwargs)
    import torch

    shape, _ = pool._kv_buffer_shapes()
    rows = shape[0]
    # SGLang pads in the same way: its paged kernels address V from K in steps of complete blocks.
    padded = rows if pool.use_hnd else -(-rows // pool.page_size) * pool.page_size
    all_layers = torch.zeros((pool.layer_num, 2, padded, *shape[1:]), dtype=pool.store_dtype, device=pool.device)
    pool.k_buffer = [all_layers[layer, 0, :rows] for layer in range(pool.layer_num)]
    pool.v_buffer = [all_layers[layer, 1, :rows] for layer in range(pool.layer_num)]
    return None


def _unsupported(pool: Any) -> str | None:
    """Why the connector does not support this pool; `None` if it does."""
    if pool.kv_cache_layout not in ("nhd", "hnd"):
        return f"its layout is {pool.kv_cache_layout}"
    if getattr(pool, "enable_custom_mem_pool", False):
        return "it lies in a memory pool of its own"
    if pool.memory_saver_adapter.enabled:
        return "the memory saver may take its memory away"
    if pool.dtype != pool.store_dtype or getattr(pool, "k_scale_buffer", None) is not None:
        # Its scales may come from a file that is in no digest (`--quantization-param-path`).
        return f"it is quantised ({pool.dtype})"
    k, v = pool._kv_buffer_shapes()
    if k != v:
        return "K and V have different shapes"
    return None if pool.layer_num else "it has no layers"


def describe(pool: Any, tag: str) -> tuple[Shared, dict[str, Any]]:
    """Shares the pool's memory. Returns the memory, and the group of layers as the protocol
    describes it. A block is a page of SGLang; block 0 is for padding. Raises `Unsupported` and
    `CannotShare`."""
    if type(pool).__name__ != "MHATokenToKVPool":
        raise Unsupported(f"its KV cache is a {type(pool).__name__}")
    if reason := _unsupported(pool):
        raise Unsupported(reason)
    storage = pool.k_buffer[0].untyped_storage()
    layers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    if any(one.untyped_storage().data_ptr() != storage.data_ptr() for pair in layers for one in pair):
        raise Unsupported("its layers do not lie in one allocation")
    first, page = pool.k_buffer[0], int(pool.page_size)
    rows = 1 if pool.use_hnd else page
    blocks = int(first.shape[0]) // rows
    size = rows * int(first[0].numel()) * first.element_size()
    if not first.is_contiguous() or first.shape[0] % rows:
        raise Unsupported("its pages are not contiguous")
    shared = share(_MEMORY, storage)
    parts = [
        part(_MEMORY, one.data_ptr() - shared.base, rows * int(one.stride(0)) * one.element_size(), size) for pair in layers for one in pair
    ]
    dtype = dtype_name(pool.store_dtype) or str(pool.store_dtype)
    encoding = f"{'hnd' if pool.use_hnd else 'nhd'}-{int(pool.head_num)}-{int(pool.head_dim)}-{dtype}"
    group = {
        "name": GROUP,
        "kind": "full-attention",
        "block_tokens": page,
        "blocks": blocks,
        "null_block": 0,
        "uncut": "the connector for SGLang is for one rank",
        "layout": f"opaque/{tag}/{encoding}"[:200],
        "components": [{"name": "kv", "parts": parts}],
    }
    add_dtype(group, pool.store_dtype)
    return shared, group


def blocks_of(slots: list[int], page: int) -> list[int]:
    """The blocks of the slots, in the same order. Raises `Unsupported` if the slots are not
    complete pages."""
    if len(slots) % page:
        raise Unsupported(f"{len(slots)} slots are not complete pages of {page} tokens")
    found = []
    for at in range(0, len(slots), page):
        if slots[at] % page or slots[at : at + page] != list(range(slots[at], slots[at] + page)):
            raise Unsupported("slots of a page do not lie one after another")
        found.append(slots[at] // page)
    return found
