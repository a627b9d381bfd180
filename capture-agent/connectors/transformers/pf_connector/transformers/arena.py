"""Pages and state slots in shared memory."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from pf_connector.layout import part


@dataclass(frozen=True)
class Region:
    """Equal tensors, one a block: block `b` begins at `offset + b · stride`."""

    name: str
    offset: int
    stride: int
    shape: tuple[int, ...]
    blocks: torch.Tensor
    """All of them: the first dimension is the block."""

    def part(self) -> dict[str, Any]:
        """The protocol's `Part`."""
        return part(MEMORY, self.offset, self.stride, self.stride)


MEMORY = "arena"
_ALIGNMENT = 64


class Arena:
    """An anonymous file in memory, cut into regions."""

    def __init__(self, wanted: list[tuple[str, int, tuple[int, ...], torch.dtype]]) -> None:
        """`wanted` lists the regions: name, blocks, shape and type of the tensor in each block."""
        places, end = [], 0
        for name, count, shape, dtype in wanted:
            stride = math.prod(shape) * dtype.itemsize
            places.append((name, end, stride, count, shape, dtype))
            end += -(-count * stride // _ALIGNMENT) * _ALIGNMENT
        self.size = max(end, mmap.PAGESIZE)
        self.descriptor = os.memfd_create("pf-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size)
        self._map = mmap.mmap(self.descriptor, self.size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.regions: dict[str, Region] = {}
        for name, offset, stride, count, shape, dtype in places:
            blocks = whole[offset : offset + count * stride].view(dtype).view(count, *shape)
            self.regions[name] = Region(name, offset, stride, shape, blocks)

    def memory(self) -> dict[str, Any]:
        """The protocol's `Memory`."""
        return {"name": MEMORY, "kind": "posix-shm", "bytes": self.size}

    def close(self) -> None:
        """Closes the descriptor. The mapping ends with the last tensor."""
        os.close(self.descriptor)


class Slots:
    """Free blocks of a group."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self.count = count

    def take(self, count: int) -> list[int] | None:
        """Takes blocks: all of them or none."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """Gives blocks back."""
        self._free.extend(reversed(blocks))
