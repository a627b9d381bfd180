"""Copies between a transformers cache and the arena.

Lists the tensors of a cache, reads them out, and builds a cache from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pf_connector.layout import add_dtype, row_major, state

from .arena import Arena

_PLAIN = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
"""Layers whose whole state is in their tensors; sliding windows and quantized layers differ."""


class Unsupported(Exception):
    """A cache of this kind cannot be captured; says which and why."""


@dataclass(frozen=True)
class Slot:
    """One state tensor of a sequence."""

    layer: int
    kind: str
    """`conv` or `recurrent`."""
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Unique in the engine."""
        return f"layers.{self.layer}.{self.kind}" + (f".{self.index}" if self.index else "")


@dataclass(frozen=True)
class Attention:
    """Keys and values of one layer, of one token."""

    layer: int
    keys: tuple[int, int]
    """Heads, dimensions."""
    values: tuple[int, int]
    dtype: torch.dtype


class Shape:
    """Which tensors a model's cache has."""

    def __init__(self, model: Any, block_tokens: int) -> None:
        """Finds the tensors by a step over two tokens."""
        self.block_tokens = block_tokens
        self._config = model.config
        with torch.no_grad():
            probe = model(torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=True).past_key_values
        self.attention: list[Attention] = []
        self.slots: list[Slot] = []
        for number, layer in enumerate(probe.layers):
            if type(layer).__name__ not in _PLAIN:
                raise Unsupported(f"layer {number} has a {type(layer).__name__}")
            if getattr(layer, "keys", None) is not None:
                keys, values = layer.keys, layer.values
                self.attention.append(Attention(number, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype))
            for kind in ("conv", "recurrent"):
                for index, tensor in sorted((getattr(layer, f"{kind}_states", None) or {}).items()):
                    if tensor is not None:
                        self.slots.append(Slot(number, kind, index, tuple(tensor.shape[1:]), tensor.dtype))

    def arena(self, blocks: int, sequences: int) -> Arena:
        """An arena with so many pages and room for the state of so many sequences."""
        wanted: list[tuple[str, int, tuple[int, ...], torch.dtype]] = []
        for one in self.attention:
            for name, (heads, width) in (("k", one.keys), ("v", one.values)):
                wanted.append((f"{name}.{one.layer}", blocks, (heads, self.block_tokens, width), one.dtype))
        wanted += [(slot.name, sequences, slot.shape, slot.dtype) for slot in self.slots]
        return Arena(wanted)

    def groups(self, arena: Arena, blocks: int, sequences: int, tag: str) -> list[dict[str, Any]]:
        """The protocol's groups."""
        found: list[dict[str, Any]] = []
        if self.attention:
            parts = [arena.regions[f"{name}.{one.layer}"].part() for one in self.attention for name in ("k", "v")]
            main: dict[str, Any] = {
                "name": "main",
                "kind": "full-attention",
                "block_tokens": self.block_tokens,
                "blocks": blocks,
                "layout": f"opaque/{tag}/head-token-dim",
                "components": [{"name": "kv", "parts": parts}],
            }
            if len({one.dtype for one in self.attention}) == 1:
                add_dtype(main, self.attention[0].dtype)
            found.append(main)
        if self.slots:
            states = []
            for slot in self.slots:
                where = arena.regions[slot.name].part()
                states.append(state(slot.name, slot.kind, where, slot.shape, slot.dtype, tag, row_major(slot.shape)))
            found.append(
                {
                    "name": "state",
                    "kind": "recurrent",
                    "block_tokens": 1,
                    "blocks": sequences,
                    "layout": f"opaque/{tag}/state",
                    "states": states,
                }
            )
        return found

    def export(self, cache: Any, arena: Arena, begin: int, end: int, pages: list[int], slot: int) -> None:
        """Copies the tokens from `begin` to `end`, and the state, into the arena."""
        for one in self.attention:
            layer = cache.layers[one.layer]
            for name, tensor in (("k", layer.keys), ("v", layer.values)):
                blocks = arena.regions[f"{name}.{one.layer}"].blocks
                for column in range(begin // self.block_tokens, -(-end // self.block_tokens)):
                    first = max(begin, column * self.block_tokens)
                    last = min(end, (column + 1) * self.block_tokens)
                    at = first - column * self.block_tokens
                    blocks[pages[column], :, at : at + last - first].copy_(tensor[0, :, first:last])
        for kept in self.slots:
            tensor = getattr(cache.layers[kept.layer], f"{kept.kind}_states")[kept.index]
            arena.regions[kept.name].blocks[slot].copy_(tensor[0])

    def build(self, arena: Arena, tokens: int, pages: list[int], slot: int) -> Any:
        """A cache of its own with the first `tokens` tokens."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        for kept in self.slots:
            tensor = arena.regions[kept.name].blocks[slot].clone().unsqueeze(0)
            layer = cache.layers[kept.layer]
            if kept.kind == "conv":
                layer.update_conv_state(tensor, state_idx=kept.index)
            else:
                layer.update_recurrent_state(tensor, state_idx=kept.index)
        for one in self.attention:
            gathered = []
            for name in ("k", "v"):
                blocks = arena.regions[f"{name}.{one.layer}"].blocks[pages]
                # [columns, heads, tokens, width] → [1, heads, tokens, width]
                gathered.append(blocks.transpose(0, 1).flatten(1, 2)[:, :tokens].unsqueeze(0).contiguous())
            cache.layers[one.layer].update(*gathered)
        return cache
