"""Digests of files: computed once, again when a file changed, never from a name unless the hub
gave it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from pf_connector import files


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.cache = self.folder / "cache"
        self.read: list[Path] = []
        hash_file = files._hash

        def counted(path: Path, count: Callable[[int], None]) -> Any:
            self.read.append(path)
            return hash_file(path, count)

        self.enterContext(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.cache)}))
        self.enterContext(mock.patch.object(files, "_SETTLED", -1e9))
        self.enterContext(mock.patch.object(files, "_hash", counted))

    def file(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def test_digests_are_those_of_the_contents_in_the_order_given(self) -> None:
        contents = [b"", b"a", b"x" * (files._PIECE + 1), b"b" * 7, b"c"]
        paths = [self.file(str(number), data) for number, data in enumerate(contents)]
        self.assertEqual(files.digests(paths, "test"), [sha256(data) for data in contents])
        self.assertEqual(files.digests([], "test"), [])

    def test_an_unchanged_file_is_read_once(self) -> None:
        path = self.file("a", b"one")
        for _ in range(2):
            self.assertEqual(files.digests([path], "test"), [sha256(b"one")])
        self.assertEqual(self.read, [path])

    def test_a_changed_file_is_read_again_even_if_its_size_and_time_of_modification_are_the_old_ones(self) -> None:
        path = self.file("a", b"one")
        files.digests([path], "test")
        stat = path.stat()
        for data in (b"two", b"longer"):
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            self.assertEqual(files.digests([path], "test"), [sha256(data)])

    def test_a_file_that_was_just_written_is_not_remembered(self) -> None:
        path = self.file("a", b"one")
        with mock.patch.object(files, "_SETTLED", 3600.0):
            for _ in range(2):
                self.assertEqual(files.digests([path], "test"), [sha256(b"one")])
        self.assertEqual(self.read, [path, path])

    def test_a_file_that_changes_while_it_is_read_has_no_digest(self) -> None:
        path = self.file("a", b"one")

        def grows(size: int) -> None:
            path.write_bytes(b"changed")

        with self.assertRaises(files.Changed):
            files._hash(path, grows)

    def test_a_broken_cache_is_replaced_and_one_that_cannot_be_written_costs_only_time(self) -> None:
        path, digest = self.file("a", b"one"), sha256(b"one")
        cache = self.cache / "pf" / "digests.json"
        cache.parent.mkdir(parents=True)
        for text in ("", "[]", '{"sha256": [1]}', json.dumps({"sha256": {files.stamp(path): "short"}}), '{"sha256": {"x": 5}}'):
            cache.write_text(text)
            self.assertEqual(files.digests([path], "test"), [digest])
            self.assertEqual(json.loads(cache.read_text())["sha256"][files.stamp(path)], digest)
        blocked = self.file("no-folder", b"")
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(blocked)}), self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(files.digests([path], "test"), [digest])

    def test_the_cache_keeps_the_newest(self) -> None:
        with mock.patch.object(files, "_REMEMBERED", 3):
            for number in range(5):
                files.digests([self.file(str(number), b"%d" % number)], "test")
        kept = json.loads((self.cache / "pf" / "digests.json").read_text())["sha256"]
        self.assertEqual(list(kept.values()), [sha256(b"%d" % number) for number in (2, 3, 4)])
        self.assertEqual([file.name for file in (self.cache / "pf").glob("digests.*")].count("digests.json"), 1)
        self.assertEqual([file.name for file in (self.cache / "pf").glob("digests.?*") if file.suffix not in (".json", ".lock")], [])

    def test_while_one_reads_the_others_wait_and_find_what_it_found(self) -> None:
        path = self.file("a", b"one")
        place = hashlib.sha256(files.stamp(path).encode()).digest()[0] % files._LOCKS
        lock = self.file(f"cache/pf/reading-{place}.lock", b"")
        found: list[list[str]] = []
        with lock.open("r+") as held, self.assertLogs("pf_connector", "INFO") as logs:
            fcntl.flock(held, fcntl.LOCK_EX)
            thread = threading.Thread(target=lambda: found.append(files.digests([path], "test")))
            thread.start()
            while not logs.output:
                pass
            self.assertEqual((self.read, found), ([], []))
            files._Cache(self.cache / "pf").remember([files._Read(files.stamp(path), sha256(b"one"), True)])
            fcntl.flock(held, fcntl.LOCK_UN)
            thread.join(30)
        self.assertEqual((self.read, found), ([], [[sha256(b"one")]]))
        self.assertIn("waiting", logs.output[0])

    def test_files_are_read_by_four_threads_of_low_priority(self) -> None:
        paths = [self.file(str(number), b"%d" % number) for number in range(6)]
        here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        together, readers = threading.Barrier(4), set[str]()
        priorities = set[int]()

        def hashed(path: Path, count: Callable[[int], None]) -> files._Read:
            readers.add(threading.current_thread().name)
            priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            try:
                if int(path.name) > 1:
                    # Of files of one size the last ones come first: none of these four ends before
                    # all have begun.
                    together.wait(10)
            except threading.BrokenBarrierError as error:
                raise OSError("fewer than four are read at once") from error
            return files._Read(files.stamp(path), sha256(path.read_bytes()), True)

        with mock.patch.object(files, "_hash", hashed):
            found = files.digests(paths, "test")
        self.assertEqual(found, [sha256(b"%d" % number) for number in range(6)])
        self.assertEqual(len(readers), 4)
        self.assertGreaterEqual(min(priorities), 10, "the engine has the processors first")
        self.assertEqual(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), here)

    def test_the_log_says_how_far_it_is(self) -> None:
        path, go = self.file("a", b"one"), threading.Event()
        hash_file = files._hash

        def slow(path: Path, count: Callable[[int], None]) -> files._Read:
            go.wait(10)
            return hash_file(path, count)

        class Said(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if " GB read" in record.getMessage():
                    go.set()

        for name, value in (("_hash", slow), ("_SAY", 0.01), ("_GB", 1.0)):
            self.enterContext(mock.patch.object(files, name, value))
        with self.assertLogs("pf_connector", "INFO") as logs:
            files.log.addHandler(Said())
            files.digests([path], "weights in /models/a")
        self.assertIn("INFO:pf_connector:weights in /models/a: 0.0 of 3.0 GB read", logs.output)

    def test_a_missing_file_is_an_error(self) -> None:
        with self.assertRaises(FileNotFoundError):
            files.digests([self.file("a", b"1"), self.folder / "missing"], "test")

    def test_large_files_of_a_commit_in_the_hubs_cache_are_not_read(self) -> None:
        digest, commit = sha256(b"weights"), "0123456789" * 4
        blob = self.file(f"models--a--b/blobs/{digest}", b"weights")
        small = self.file(f"models--a--b/blobs/{'a' * 40}", b"small")
        links = []
        for name, target in (("model.safetensors", blob), ("config.json", small)):
            link = self.folder / "models--a--b" / "snapshots" / commit / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(target, link.parent))
            links.append(link)
        self.assertEqual(files.digests(links, "test"), [digest, sha256(b"small")])
        self.assertEqual(self.read, [links[1]])
        # A link that only looks like one, and not in the snapshot of a commit.
        other = self.folder / "model" / "model.safetensors"
        other.parent.mkdir()
        other.symlink_to(blob)
        blob.write_bytes(b"edited")
        self.assertEqual(files.digests([other], "test"), [sha256(b"edited")])


if __name__ == "__main__":
    unittest.main()
