"""Keys of a request's prefixes: the chain `pf-prefix-v1` of the registry (`schema/src/prefix.rs`),
computed once and in steps.

vLLM has block hashes of its own (`request.block_hashes`), but they are no names outside of the
process that made them: by default their chain begins with random bytes, the hash is over pickled
objects, and there is none for a prefix that ends within a block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

from .tokens import pack

SCHEME = b"pf-prefix-v1"
BLOCK = 16
"""Tokens in one link."""

_STEP = 64
"""Links at a time: about 0.1 ms, then another thread may have the interpreter."""
_WIDTH = 32


def root(fingerprint: bytes, salt: str, adapter: str | None) -> bytes:
    """The key of no tokens. `fingerprint` is the digest's 32 bytes."""
    words = [SCHEME, fingerprint, _text(salt.encode())]
    words += [b"\0"] if adapter is None else [b"\1", _text(adapter.encode())]
    return sha256(b"".join(words)).digest()


def ladder(limit: int) -> Iterator[int]:
    """Lengths up to `limit` whose keys tell roughly where two prefixes part: a block, two, four,
    and so on."""
    length = BLOCK
    while length <= limit:
        yield length
        length *= 2


class Chain:
    """Keys of the prefixes of `tokens`, of which those that were looked at must not change. Not for
    two threads at once."""

    def __init__(self, root: bytes, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._links = bytearray(root)

    def key(self, length: int) -> bytes:
        """The key of the first `length` tokens. Raises `ValueError`, `OverflowError` for what is no
        token."""
        whole, rest = divmod(length, BLOCK)
        self._extend(whole)
        link = bytes(self._links[whole * _WIDTH : (whole + 1) * _WIDTH])
        return sha256(link + pack(self._tokens[whole * BLOCK : length])).digest() if rest else link

    def _extend(self, blocks: int) -> None:
        at = len(self._links) // _WIDTH - 1
        while at < blocks:
            upto = min(at + _STEP, blocks)
            data = pack(self._tokens[at * BLOCK : upto * BLOCK])
            if len(data) != (upto - at) * BLOCK * 4:
                raise ValueError(f"{blocks * BLOCK} tokens are needed")
            link = bytes(self._links[-_WIDTH:])
            links = []
            for offset in range(0, len(data), BLOCK * 4):
                link = sha256(link + data[offset : offset + BLOCK * 4]).digest()
                links.append(link)
            self._links += b"".join(links)
            at = upto
            time.sleep(0)


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
