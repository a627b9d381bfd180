"""Token ids as bytes, `u32` little-endian: as prefix keys hash them and as messages carry them."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence

_STEP = 1 << 14
"""Tokens at a time: about 0.2 ms, then another thread may have the interpreter."""


class Packed:
    """Tokens of a message. `parts` are their bytes, four for each token, in pieces: copying all at
    once would take long."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, tokens: Sequence[int], count: int) -> Packed:
        """The first `count` tokens or fewer, if there are not as many. They must not change. Raises
        `TypeError`, `OverflowError` for what is no token.

        Not for the thread that schedules: it takes a few milliseconds for 380,000, in which others
        run.
        """
        parts = []
        for at in range(0, min(count, len(tokens)), _STEP):
            parts.append(pack(tokens[at : min(at + _STEP, count)]))
            time.sleep(0)
        return cls(parts)


def pack(tokens: Sequence[int]) -> bytes:
    """Some tokens, at once."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
