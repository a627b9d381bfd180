"""Which heads or channels of each layer a worker holds, so that the agent can give an engine with
other ranks its part.

vLLM spreads heads and channels over the ranks of tensor parallelism in order. If there are fewer KV
heads than ranks, neighbours hold the same head (`QKVParallelLinear`). A convolution window has
several projections, and a rank has its part of each, one after another (`mamba_utils`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

PARALLEL = ("tp", "ep")
"""Numbers of the engine configuration that say only how ranks share the state and the sums."""


class Uncut(Exception):
    """These caches cannot be cut for other ranks; says why."""


@dataclass(frozen=True)
class Shares:
    """The shares of one rank of tensor parallelism."""

    tp: int = 1
    heads: int = 0
    """KV heads of the model, over all ranks."""
    reason: str | None = None
    """Why nothing can be cut."""
    rank: int = 0

    @classmethod
    def of(cls, vllm_config: Any) -> Shares:
        """Those of rank 0."""
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        contexts = [int(getattr(parallel, f"{name}_context_parallel_size", None) or 1) for name in ("decode", "prefill")]
        reason = "context parallelism spreads tokens over ranks" if max(contexts) > 1 else None
        total = getattr(model, "get_total_num_kv_heads", None)
        return cls(int(parallel.tensor_parallel_size), int(total() or 0) if total is not None else 0, reason)

    def at(self, rank: int) -> Shares:
        """Those of a worker. Ranks of tensor parallelism are neighbours."""
        return replace(self, rank=rank % self.tp)

    def heads_in_all(self, spec: Any) -> int:
        """KV heads of a layer over all ranks, or those here if nothing is known of the others."""
        try:
            return int(self._heads(int(spec.num_kv_heads))["of"])
        except Uncut:
            return int(spec.num_kv_heads)

    def layer(self, name: str, spec: Any, cache: Any, blocks: int, size: int) -> dict[str, Any]:
        """The protocol's share of a layer in its part of a page. `cache` is
        `[blocks, heads, states, content]` in any order of memory, `size` the bytes of a page.
        Raises `Uncut`."""
        if self.reason is not None:
            raise Uncut(self.reason)
        if getattr(spec, "max_tp_shards", None) == 1:
            # Latent caches: every rank holds all of it.
            return {"layer": name, "outer": 1, "cell": size, "share": _all(1)}
        quantised = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
        if quantised != "NONE":
            raise Uncut(f"quantised ({quantised.lower()}): its heads may share a scale")
        if getattr(spec, "num_head_slots", None) is not None or getattr(spec, "state_content_bytes", None) is not None:
            raise Uncut("the attention backend packs heads in a way of its own")
        local = int(spec.num_kv_heads)
        share = self._heads(local)
        outer, cell = _units(cache, blocks, local, size)
        return {"layer": name, "outer": outer, "cell": cell, "share": share}

    def states(self, spec: Any) -> list[dict[str, Any]]:
        """The protocol's shares of a layer's state tensors. Raises `Uncut`."""
        if self.reason is not None:
            raise Uncut(self.reason)
        shapes = [[int(n) for n in shape] for shape in spec.shapes]
        if getattr(spec, "tp_replicated", False):
            return [{"axis": 0, "share": _all(shape[0])} for shape in shapes]
        kind = str(spec.mamba_type.name)
        convolutions = {"MAMBA1": 1, "MAMBA2": 1, "GDN_ATTN": 1, "SHORT_CONV": 1, "LINEAR": 0}.get(kind)
        if convolutions is None or len(shapes) != (1 if kind in ("SHORT_CONV", "LINEAR") else 2):
            raise Uncut(f"recurrent state of a kind whose shares are not known ({kind.lower()}, {len(shapes)} tensors)")
        found = []
        if convolutions:
            axis = 0 if _dimension_first() else 1
            found.append(self._split(axis, self._projections(kind, shapes, shapes[0][axis])))
        # The state itself has heads or channels first.
        found += [self._split(0, [shape[0]]) for shape in shapes[convolutions:]]
        return found

    def _projections(self, kind: str, shapes: list[list[int]], channels: int) -> list[int]:
        """Channels of each projection of a convolution window here."""
        if kind not in ("MAMBA2", "GDN_ATTN"):
            return [channels]
        values = shapes[1][0] * shapes[1][1]
        beside, odd = divmod(channels - values, 2)
        if beside <= 0 or odd:
            raise Uncut(f"a convolution of {channels} channels for {values} values")
        if kind == "GDN_ATTN":
            return [beside, beside, values]
        if self.tp > 1 and beside == shapes[1][2]:
            raise Uncut("one group a rank: it is not known whether ranks have the same group")
        return [values, beside, beside]

    def _split(self, axis: int, sizes: list[int]) -> dict[str, Any]:
        """Sections, each spread over the ranks in order. `sizes` are those here."""
        held: list[list[int]] = []
        base = 0
        for size in sizes:
            held.append([base + self.rank * size, base + (self.rank + 1) * size])
            base += size * self.tp
        return {"axis": axis, "share": {"of": base, "held": held}}

    def _heads(self, local: int) -> dict[str, Any]:
        if self.tp == 1 or local > 1 or self.heads == self.tp:
            return {"of": local * self.tp, "held": [[self.rank * local, (self.rank + 1) * local]]}
        if not 0 < self.heads < self.tp:
            raise Uncut(f"one head a rank in a layer of a model with {self.heads}: it is not known which")
        if self.tp % self.heads:
            raise Uncut(f"{self.heads} heads do not divide among {self.tp} ranks")
        head = self.rank // (self.tp // self.heads)
        return {"of": self.heads, "held": [[head, head + 1]]}


def _all(units: int) -> dict[str, Any]:
    return {"of": units, "held": [[0, units]]}


def _units(cache: Any, blocks: int, heads: int, size: int) -> tuple[int, int]:
    """How often the heads of a block repeat, and the bytes of one. Raises `Uncut`."""
    if int(cache.shape[1]) != heads:
        raise Uncut(f"a cache of shape {tuple(cache.shape)} for {heads} heads")
    # A block may consist of several blocks of the kernel.
    sizes = [int(cache.shape[0]) // blocks, *(int(n) for n in cache.shape[1:])]
    order = sorted((int(cache.stride(i)), n, i == 1) for i, n in enumerate(sizes) if n > 1)
    elements = 1
    inside: int | None = None
    for stride, n, is_heads in order:
        if stride != elements:
            raise Uncut("its pages have gaps")
        if is_heads:
            inside = elements
        elements *= n
    if elements * int(cache.element_size()) != size:
        raise Uncut(f"pages of {size} bytes with {elements} elements")
    if inside is None:
        return 1, size
    return elements // (inside * heads), inside * int(cache.element_size())


def _dimension_first() -> bool:
    """Whether a convolution window is `[channels, tokens]`."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    except ImportError as error:
        raise Uncut("this vLLM does not say how it lays out convolution windows") from error
    return bool(is_conv_state_dim_first())
