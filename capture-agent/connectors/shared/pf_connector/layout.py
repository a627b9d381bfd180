"""Builders of the protocol's layouts, shared by the engines' connectors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class Unsupported(Exception):
    """State that cannot be captured or restored; says why."""


_DTYPES = {
    "torch.float64": "f64",
    "torch.float32": "f32",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "fp8e4m3",
    "torch.float8_e5m2": "fp8e5m2",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint64": "u64",
    "torch.uint32": "u32",
    "torch.uint16": "u16",
    "torch.uint8": "u8",
    "torch.bool": "bool",
}


def dtype_name(dtype: Any) -> str | None:
    """The protocol's name of a torch dtype; `None` if it has none."""
    return _DTYPES.get(str(dtype))


def add_dtype(group: dict[str, Any], dtype: Any) -> None:
    """Says of which type the elements of a paged group are, if the protocol has a name for it: the
    agent then knows how to encode its pages."""
    name = dtype_name(dtype)
    if name is not None:
        group["dtype"] = name


def layer_number(name: str) -> int | None:
    """The layer that a module's name belongs to: 3 for `model.layers.3.self_attn`."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for dimension in reversed(shape):
        strides.append(step)
        step *= dimension
    return strides[::-1]


def part(memory: str, offset: int, block_stride: int, size: int) -> dict[str, Any]:
    """The protocol's `Part`."""
    return {"memory": memory, "offset": offset, "block_stride": block_stride, "bytes": size}


def state(
    name: str,
    kind: str,
    where: dict[str, Any],
    shape: Sequence[int],
    dtype: Any,
    tag: str,
    strides: Sequence[int] | None,
) -> dict[str, Any]:
    """The protocol's `State`: affine if `strides` are given, otherwise opaque.

    Strides are in elements, from the first byte of the part.
    """
    known = dtype_name(dtype)
    if known is None or strides is None:
        # The engine's own encoding: only the same engine configuration can read it.
        known, shape, strides = (known or "u8"), list(shape), None
        if dtype_name(dtype) is None:
            shape = [where["bytes"]]
    layout: dict[str, Any] = {"tag": tag}
    if strides is not None:
        layout |= {"strides": list(strides), "offset": 0}
    described: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "shape": list(shape),
        "logical_dtype": known,
        "storage_dtype": known,
        "layout": layout,
        "part": where,
    }
    layer = layer_number(name)
    if layer is not None:
        described["layer"] = layer
    return described
