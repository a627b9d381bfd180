"""The layout of a worker's pages, in the types of the protocol.

vLLM places layer `l` of a cache tensor at `offset + l · layer_stride + block · block_stride` of one
allocation. The bytes within a page are the attention backend's own: pages are opaque. Recurrent
pages hold the state tensors one after another; the tensors that the layer itself reads say how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pf_connector.layout import Unsupported, add_dtype, part, state
from pf_connector.memory import Shared, share

from .shares import Shares, Uncut

_KINDS = {
    "full_attention": "full-attention",
    "mla_attention": "mla",
    "sliding_window": "sliding-window",
    "sliding_window_mla": "sliding-window",
    "mamba": "recurrent",
}


@dataclass(frozen=True)
class Group:
    """The fields of a cache group that page tables need."""

    index: int
    name: str
    kind: str
    block_tokens: int

    @property
    def recurrent(self) -> bool:
        """Whether each sequence has one block of state in it."""
        return self.kind == "recurrent"


def groups(config: Any) -> list[Group]:
    """The groups of a `KVCacheConfig` that make up a sequence's state."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    found = []
    for index, group in enumerate(config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
        if kind not in _KINDS or getattr(group, "host_resident", False):
            raise Unsupported(f"cache group {index} ({kind}) has no form that can be captured")
        found.append(Group(index, f"{_KINDS[kind]}-{index}", _KINDS[kind], int(group.kv_cache_spec.block_size)))
    return found


def columns(found: list[Group], blocks: tuple[list[int], ...], boundary: int) -> dict[str, list[int]]:
    """Blocks by column of a sequence of `boundary` tokens.

    A recurrent group has one block: the one with the state after those tokens.
    """
    table = {}
    for group in found:
        row = blocks[group.index]
        count = -(-boundary // group.block_tokens)
        if len(row) < count or count == 0:
            raise Unsupported(f"group {group.name} has {len(row)} blocks, {count} are needed for {boundary} tokens")
        table[group.name] = [int(row[count - 1])] if group.recurrent else [int(block) for block in row[:count]]
    return table


class Pages:
    """A worker's memory and layout, ready to be registered."""

    def __init__(self, config: Any, caches: dict[str, Any], layers: dict[str, Any], tag: str, shares: Shares | None = None) -> None:
        """`caches` is the argument of `register_kv_caches`, `layers` are the modules by name.

        `tag` is the prefix of the names of opaque layouts, `shares` this rank's part of each layer.
        """
        self._config = config
        self._caches = caches
        self._layers = layers
        self._tag = tag
        self._shares = shares or Shares()
        self._places = {name: (tensor, i) for tensor in config.kv_cache_tensors for i, name in enumerate(tensor.layers)}
        self._shared: dict[int, Shared] = {}
        self._bytes: dict[str, Any] = {}
        """Each memory as one tensor of bytes."""
        self.groups = [self._group(group) for group in groups(config)]

    @property
    def memories(self) -> list[dict[str, Any]]:
        """The protocol's memories."""
        return [shared.memory for shared in self._shared.values()]

    @property
    def descriptors(self) -> list[int]:
        """Their descriptors, in order."""
        return [fd for shared in self._shared.values() for fd in shared.descriptors]

    def _memory(self, cache: Any) -> Shared:
        storage = cache.untyped_storage()
        found = self._shared.get(storage._cdata)
        if found is None:
            found = share(f"kv-{len(self._shared)}", storage)
            self._shared[storage._cdata] = found
            import torch

            self._bytes[found.memory["name"]] = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        return found

    def copy(self, group: str, source: int, target: int) -> None:
        """Copies a block to another one, in all layers of a group, on the current stream."""
        layout = next(layout for layout in self.groups if layout["name"] == group)
        parts = [part for component in layout.get("components", ()) for part in component["parts"]]
        parts += [state["part"] for state in layout.get("states", ())]
        for one in parts:
            memory, size = self._bytes[one["memory"]], one["bytes"]
            start, end = (one["offset"] + block * one["block_stride"] for block in (source, target))
            memory[end : end + size].copy_(memory[start : start + size])

    def _group(self, group: Group) -> dict[str, Any]:
        spec = self._config.kv_cache_groups[group.index]
        # Layers that read another layer's cache have no place of their own.
        names = [name for name in spec.layer_names if name in self._places]
        specs = [_layer_spec(spec.kv_cache_spec, name) for name in names]
        described: dict[str, Any] = {
            "name": group.name,
            "kind": group.kind,
            "block_tokens": 1 if group.recurrent else group.block_tokens,
            "blocks": int(self._config.num_blocks),
            "null_block": 0,
        }
        if group.recurrent:
            described["states"] = [one for name, its in zip(names, specs, strict=True) for one in self._states(name, its)]
            described["layout"] = self._opaque("state", specs[0])
            described["replicated"] = bool(getattr(specs[0], "tp_replicated", False))
        else:
            name = "latent" if group.kind == "mla" else "kv"
            described["components"] = [{"name": name, "parts": [self._page(name, its) for name, its in zip(names, specs, strict=True)]}]
            described["layout"] = self._opaque(self._backend(names[0]), specs[0])
            # Caches of this type are bytes to torch.
            fp8 = getattr(specs[0], "cache_dtype_str", None) in ("fp8", "fp8_e4m3")
            add_dtype(described, "torch.float8_e4m3fn" if fp8 else self._caches[names[0]].dtype)
        try:
            self._share(described, names, specs)
        except Uncut as reason:
            described["uncut"] = str(reason)[:200]
        if group.kind == "sliding-window":
            described["window"] = int(specs[0].sliding_window) + int(getattr(specs[0], "extra_retained_tokens", 0))
        return described

    def _share(self, described: dict[str, Any], names: list[str], specs: list[Any]) -> None:
        """Adds which part of each layer this rank holds. Raises `Uncut`, and has added nothing
        then."""
        blocks = int(self._config.num_blocks)
        if "states" in described:
            owners = described["states"]
            shares = [one for spec in specs for one in self._shares.states(spec)]
            for owner, found in zip(owners, shares, strict=True):
                if owner["shape"][found["axis"]] != sum(end - start for start, end in found["share"]["held"]):
                    raise Uncut(f"{owner['name']} has shape {owner['shape']}")
        else:
            owners = described["components"][0]["parts"]
            shares = [
                self._shares.layer(name, spec, self._caches[name], blocks, owner["bytes"])
                for name, spec, owner in zip(names, specs, owners, strict=True)
            ]
        for owner, found in zip(owners, shares, strict=True):
            owner["share"] = found

    def _place(self, name: str) -> tuple[Shared, int, int]:
        """A layer's memory, the offset of its block 0, and the bytes from one block to the next."""
        tensor, index = self._places[name]
        cache = self._caches[name]
        shared = self._memory(cache)
        offset = tensor.offset + index * tensor.layer_stride
        if cache.data_ptr() - shared.base != offset:
            raise Unsupported(f"{name} does not lie where its configuration says")
        return shared, offset, tensor.block_stride

    def _page(self, name: str, spec: Any) -> dict[str, Any]:
        shared, offset, stride = self._place(name)
        size = int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
        cache = self._caches[name]
        kernel_blocks = cache.shape[0] // self._config.num_blocks
        steps = sum((n - 1) * s for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        reach = (cache.stride(0) * (kernel_blocks - 1) + steps + 1) * cache.element_size()
        if reach > size:
            raise Unsupported(f"{name}: a page of {size} bytes is spread over {reach}; choose another cache layout")
        return part(shared.memory["name"], offset, stride, size)

    def _states(self, name: str, spec: Any) -> list[dict[str, Any]]:
        shared, offset, stride = self._place(name)
        views = getattr(self._layers.get(name), "kv_cache", None)
        last = "ssm" if "mamba" in spec.mamba_type.name.lower() else "recurrent"
        found, at = [], offset
        for index, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
            # Convolution windows come first, the state that carries the prefix last.
            conv = index < len(spec.shapes) - 1 or "conv" in spec.mamba_type.name.lower()
            kind = "conv" if conv else last
            elements = 1
            for dimension in shape:
                elements *= dimension
            size = elements * dtype.itemsize
            view = views[index] if isinstance(views, (tuple, list)) and len(views) == len(spec.shapes) else None
            strides = None
            if view is not None and view.data_ptr() - shared.base == at and tuple(view.shape[1:]) == tuple(shape):
                inner = view.stride()[1:]
                reach = sum((n - 1) * s for n, s in zip(shape, inner, strict=True)) + 1
                affine = min(inner, default=0) >= 0 and reach <= elements and view.stride(0) * dtype.itemsize == stride
                strides = list(inner) if affine else None
            label = f"{name}.{kind}" if len(spec.shapes) <= 2 else f"{name}.{kind}.{index}"
            where = part(shared.memory["name"], at, stride, size)
            found.append(state(label, kind, where, shape, dtype, f"{self._tag}/{spec.mamba_type.name.lower()}", strides))
            at += size
        return found

    def _backend(self, name: str) -> str:
        get = getattr(self._layers.get(name), "get_attn_backend", None)
        return str(get().get_name()) if get is not None else "unknown"

    def _opaque(self, backend: str, spec: Any) -> str:
        """Names what decides the bytes of a page: equal names, equal encoding."""
        words = [f"opaque/{self._tag}", backend, str(self._config.kv_cache_layout or "")]
        fields = ("num_kv_heads", "head_size", "head_size_v", "dtype", "cache_dtype_str", "mamba_cache_mode")
        given = {field: getattr(spec, field) for field in fields if getattr(spec, field, None) is not None}
        if "num_kv_heads" in given:
            # The encoding of a head is the same on any number of ranks.
            given["num_kv_heads"] = self._shares.heads_in_all(spec)
        values = [str(value).removeprefix("torch.") for value in given.values()]
        quant = getattr(getattr(spec, "kv_quant_mode", None), "name", None)
        return "/".join([*words, "-".join([*values, *([quant.lower()] if quant else [])])])[:200]


def _layer_spec(spec: Any, layer: str) -> Any:
    """A group of layers of one type and different shapes has a specification for each."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec
