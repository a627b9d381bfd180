"""Writing a snapshot directory, which `Client.push` takes. docs/formats.md has the format."""

from __future__ import annotations

import array
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import Error

Dtype = Literal["bf16", "f16", "f32", "fp8e4m3"]
Buffer = bytes | bytearray | memoryview

_ELEMENT = {"bf16": 2, "f16": 2, "f32": 4, "fp8e4m3": 1}
_MANIFEST = "page_manifest.json"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a page: K or V of `page_size_tokens` tokens, in the order layer, token, head,
    dimension. `n_layers` and `n_heads` are those of this rank. Raises `Error` (`invalid_document`)
    for numbers below 1 and other types of elements."""

    page_size_tokens: int
    n_layers: int
    n_heads: int
    head_dim: int
    dtype: Dtype

    def __post_init__(self) -> None:
        for name in ("page_size_tokens", "n_layers", "n_heads", "head_dim"):
            if not _is_count(getattr(self, name), least=1):
                raise _invalid(f"{name} is {getattr(self, name)!r}: expected 1 or more")
        if self.dtype not in _ELEMENT:
            raise _invalid(f"dtype is {self.dtype!r}: expected one of {', '.join(_ELEMENT)}")

    @property
    def page_bytes(self) -> int:
        """Bytes of the K of a page, and of its V."""
        return math.prod((self.page_size_tokens, self.n_layers, self.n_heads, self.head_dim, _ELEMENT[self.dtype]))


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence: its pages in the order of its tokens, by their numbers, and how many tokens."""

    pages: Items[int]
    tokens: int


def write_snapshot(
    directory: str | os.PathLike[str],
    geometry: Geometry,
    pages: Iterable[tuple[Buffer, Buffer]],
    sequences: Mapping[str, Sequence],
    *,
    tokens: Items[int] | None = None,
    config: Mapping[str, Any] | None = None,
    attachments: Mapping[str, Buffer] | None = None,
) -> None:
    """Writes a snapshot with one group of layers, of one rank.

    `pages` are the K and V bytes of each page, numbered from 0; of a NumPy array `a`,
    `a.view("uint8").data`. They are taken one by one, and equal ones are stored once. `tokens` are
    the token ids; `config` is the snapshot's configuration. The manifest is written last: a
    directory that has one is complete. Raises `Error` (`invalid_document`) for what is no snapshot,
    and `OSError`.
    """
    root = Path(directory)
    if (root / _MANIFEST).exists() or (root / "snapshot.json").exists():
        raise _invalid(f"{root} holds a snapshot already")
    root.mkdir(parents=True, exist_ok=True)
    listed: list[dict[str, Any]] = []
    for number, page in enumerate(pages):
        try:
            key, value = page
        except (TypeError, ValueError):
            raise _invalid(f"page {number} is not a pair of K and V") from None
        digests = {name: _blob(root, data, geometry, f"{name} of page {number}") for name, data in (("k", key), ("v", value))}
        listed.append({"ix": number, **digests})
    written = [_sequence(name, sequences[name], geometry, len(listed)) for name in sorted(sequences, key=str.encode)]
    if tokens is not None:
        _write(root, root / "tokens.bin", _u32(tokens))
    if config is not None:
        _write(root, root / "config.json", _compact(config, "the configuration"))
    for name, data in (attachments or {}).items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise _invalid(f"no attachment may have the name {name!r}")
        content = _bytes(data, f"attachment {name}")
        (root / "attachments").mkdir(exist_ok=True)
        _write(root, root / "attachments" / name, content)
    shape: dict[str, Any] = {name: getattr(geometry, name) for name in ("page_size_tokens", "n_layers", "n_heads", "head_dim", "dtype")}
    manifest: dict[str, Any] = {"layout": "paged-batchinvariant-v1", **shape, "pages": listed, "logical_seqs": written}
    _write(root, root / _MANIFEST, _compact(manifest, "the manifest"))


def _bytes(data: Buffer, what: str) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise _invalid(f"{what} is not bytes in one piece: {error}") from None


def _is_count(number: object, *, least: int = 0) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _blob(root: Path, data: Buffer, geometry: Geometry, what: str) -> str:
    """Writes the bytes of a page unless they are there; returns their digest."""
    view = _bytes(data, what)
    if view.nbytes != geometry.page_bytes:
        raise _invalid(f"{what} has {view.nbytes} bytes, and {geometry.page_bytes} are expected")
    name = hashlib.sha256(view).hexdigest()
    path = root / "blobs" / "sha256" / name[:2] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(root, path, view)
    return f"sha256:{name}"


def _sequence(name: str, sequence: Sequence, geometry: Geometry, pages: int) -> dict[str, Any]:
    size = geometry.page_size_tokens
    if not _is_count(sequence.tokens):
        raise _invalid(f"sequence {name} has {sequence.tokens!r} tokens: expected 0 or more")
    needed = -(-sequence.tokens // size)
    if len(sequence.pages) != needed:
        raise _invalid(f"sequence {name} has {len(sequence.pages)} pages, and {sequence.tokens} tokens need {needed}")
    unknown = [ix for ix in sequence.pages if not (_is_count(ix) and ix < pages)]
    if unknown:
        raise _invalid(f"sequence {name} names page {unknown[0]!r}, and there are {pages}")
    return {"id": name, "page_ixs": list(sequence.pages), "fill_in_last_page": sequence.tokens % size}


def _u32(numbers: Items[int]) -> bytes:
    """Numbers of 32 bits, little-endian."""
    try:
        packed = array.array("I", numbers)
    except (OverflowError, TypeError, ValueError) as error:
        raise _invalid(f"a token id is a number of 32 bits: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _compact(document: Mapping[str, Any], what: str) -> bytes:
    """The one spelling that a reader of manifests takes."""
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise _invalid(f"{what} is not JSON: {error}") from None


def _write(root: Path, path: Path, data: bytes | memoryview) -> None:
    """Writes a file under a temporary name first: a file that is there is complete. A kill leaves
    files where no reader looks."""
    with tempfile.NamedTemporaryFile(dir=root, prefix=".", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _invalid(message: str) -> Error:
    return Error("invalid_document", message)
