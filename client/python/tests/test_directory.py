"""Snapshot directories that cannot be written."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

from pf_client import Error, Geometry, Sequence, write_snapshot

GEOMETRY = Geometry(page_size_tokens=16, n_layers=2, n_heads=2, head_dim=8, dtype="f16")
WHOLE = (bytes(GEOMETRY.page_bytes), bytes(GEOMETRY.page_bytes))


class Directory(unittest.TestCase):
    def test_a_shape_that_no_page_has_is_refused(self) -> None:
        right: dict[str, Any] = {"page_size_tokens": 16, "n_layers": 2, "n_heads": 2, "head_dim": 8, "dtype": "f16"}
        for name, value in (("dtype", "int8"), ("n_layers", -2), ("n_heads", 0), ("head_dim", 1.5), ("page_size_tokens", True)):
            with self.assertRaisesRegex(Error, f"^invalid_document: {name} is "):
                Geometry(**{**right, name: value})

    def test_what_is_not_a_snapshot_is_refused(self) -> None:
        pages: Any
        for pages, says in (
            ([("k", "v")], "k of page 0 is not bytes"),
            ([(WHOLE[0],)], "page 0 is not a pair"),
            ([WHOLE[0]], "page 0 is not a pair"),
            ([3], "page 0 is not a pair"),
            ([(memoryview(WHOLE[0] * 2)[::2], WHOLE[1])], "k of page 0 is not bytes"),
        ):
            self.refused(says, pages=pages)
        sequences: Any
        for sequences, says in (
            ({"main": Sequence([], -3)}, "-3 tokens"),
            ({"main": Sequence([-1], 3)}, "names page -1"),
            ({"main": Sequence(["0"], 3)}, "names page '0'"),  # type: ignore[list-item]
        ):
            self.refused(says, sequences=sequences)
        for tokens in (["x"], "x", [-1], [1 << 32]):
            self.refused("a token id", tokens=tokens)
        for config in ({"a": {1}}, {"a": float("nan")}, {"a": "\udc80"}):
            self.refused("the configuration is not JSON", config=config)
        self.refused("attachment notes is not bytes", attachments={"notes": "text"})

    def refused(self, says: str, *, pages: Any = (WHOLE,), sequences: Any = None, **more: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(Error, f"^invalid_document: .*{says}"):
                write_snapshot(folder, GEOMETRY, pages, sequences or {"main": Sequence([0], 16)}, **more)
            self.assertFalse((Path(folder) / "page_manifest.json").exists())
