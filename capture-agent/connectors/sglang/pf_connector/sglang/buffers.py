"""All layers of SGLang's pool in one allocation, and its layout in the types of the protocol.

SGLang allocates each layer by itself, and a page of ours must lie in one memory. Each layer's K and
V keep the shape, the strides and the distance that SGLang gives them; only the layers lie one after
another.
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
    """In place of `MHATokenToKVPool._create_buffers_normal`. A pool that this does not fit is
    left to SGLang; then it is not captured, and `describe` says why."""
    reason = _apart(pool)
    if reason is not None:
        log.warning("the KV cache is allocated layer by layer: %s", reason)
        return original(pool, *args, **kwargs)
    import torch

    shape, _ = pool._kv_buffer_shapes()
    rows = shape[0]
    # SGLang's own padding: paged kernels reach V from K by whole blocks.
    padded = rows if pool.use_hnd else -(-rows // pool.page_size) * pool.page_size
    all_layers = torch.zeros((pool.layer_num, 2, padded, *shape[1:]), dtype=pool.store_dtype, device=pool.device)
    pool.k_buffer = [all_layers[layer, 0, :rows] for layer in range(pool.layer_num)]
    pool.v_buffer = [all_layers[layer, 1, :rows] for layer in range(pool.layer_num)]
    return None


def _apart(pool: Any) -> str | None:
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
    """Shares the pool's memory: the memory, and the protocol's group. A block is a page of
    SGLang's; block 0 is for padding. Raises `Unsupported`, `CannotShare`."""
    if type(pool).__name__ != "MHATokenToKVPool":
        raise Unsupported(f"its KV cache is a {type(pool).__name__}")
    if reason := _apart(pool):
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
    """The blocks of slots in their order. Raises `Unsupported` if these are not whole pages."""
    if len(slots) % page:
        raise Unsupported(f"{len(slots)} slots are not whole pages of {page}")
    found = []
    for at in range(0, len(slots), page):
        if slots[at] % page or slots[at : at + page] != list(range(slots[at], slots[at] + page)):
            raise Unsupported("slots of a page do not lie one after another")
        found.append(slots[at] // page)
    return found
