"""The client against a real registry, with the real `pf`."""

from __future__ import annotations

import array
import hashlib
import os
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

from pf_client import Client, Error, Event, Geometry, Reset, Sequence, write_snapshot
from programs import PF, Registry, synthetic

GEOMETRY = Geometry(page_size_tokens=16, n_layers=2, n_heads=2, head_dim=8, dtype="f16")

registry: Registry


def setUpModule() -> None:
    global registry
    registry = Registry()


def tearDownModule() -> None:
    registry.stop()


def page(number: int, side: str) -> bytes:
    """Bytes that no other page has."""
    return hashlib.sha256(f"{side} {number}".encode()).digest() * (GEOMETRY.page_bytes // 32)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        # Nothing of this machine's settings counts.
        left = {name: value for name, value in os.environ.items() if not name.startswith(("PF_", "XDG_"))}
        self.enterContext(mock.patch.dict(os.environ, {**left, "HOME": str(self.folder)}, clear=True))
        self.client = Client(registry.url, program=PF)
        self.repository = f"tests/{self._testMethodName.replace('_', '-')}"

    def page(self, number: int, side: str) -> bytes:
        """Bytes that no page of another test has: the tests share a registry."""
        return page(number, f"{self._testMethodName} {side}")

    def directory(self, name: str, pages: int) -> Path:
        """A snapshot whose beginning all others of the test share."""
        numbers = range(pages)
        content = ((self.page(number, "k"), memoryview(self.page(number, "v"))) for number in numbers)
        write_snapshot(self.folder / name, GEOMETRY, content, {"main": Sequence(numbers, 16 * pages - 3)}, tokens=range(16 * pages - 3))
        return self.folder / name

    def refused(self, code: str) -> unittest.case._AssertRaisesContext[Error]:
        return self.assertRaisesRegex(Error, f"^{code}: ")


class Snapshots(Case):
    def test_what_is_pushed_is_what_is_pulled_and_only_new_pages_are_sent(self) -> None:
        first = self.client.push(self.directory("one", 4), self.repository, "one")
        self.assertEqual((first.pages, first.created), (4, True))
        second = self.client.push(self.directory("two", 5), self.repository, "two", parents=["one"])
        # K and V of each page are blobs. All else is nodes, the configuration and the tokens.
        self.assertGreaterEqual(first.blobs_sent, 2 * 4)
        others = second.blobs_total - 2 * 5
        self.assertLessEqual(second.blobs_sent, 2 * 1 + others)
        again = self.client.push(self.folder / "one", self.repository, "again")
        self.assertEqual((again.digest, again.created, again.blobs_sent), (first.digest, False, 0))
        for ref in ("two", second.digest, f"@{second.digest.split(':')[1][:12]}"):
            pulled = self.client.pull(self.repository, ref, self.folder / "back")
            self.assertEqual((pulled.digest, pulled.pages), (second.digest, 5))
        name = hashlib.sha256(self.page(4, "k")).hexdigest()
        self.assertEqual((self.folder / "back" / "blobs" / "sha256" / name[:2] / name).read_bytes(), self.page(4, "k"))
        self.assertEqual((self.folder / "back" / "tokens.bin").read_bytes(), array.array("I", range(77)).tobytes())
        lineage = self.client.lineage(self.repository, "two")
        self.assertEqual(([one.digest for one in lineage.snapshots], lineage.truncated), ([second.digest, first.digest], False))
        self.assertEqual(self.client.lineage(self.repository, "two~1").snapshots[0].digest, first.digest)
        stats = self.client.stats(self.repository)
        self.assertEqual([one.digest for one in stats.snapshots], [first.digest, second.digest])
        self.assertLess(stats.unique_bytes, stats.logical_bytes)
        self.assertGreaterEqual(self.client.stats().logical_bytes, stats.logical_bytes)
        some = self.client.stats(self.repository, below=second.digest, agent="nobody")
        self.assertEqual((some.below, some.agent, some.snapshots), (second.digest, "nobody", []))
        everywhere = self.client.stats(agent="nobody")
        self.assertEqual((everywhere.agent, everywhere.snapshots), ("nobody", []))
        with self.assertRaises(ValueError):
            self.client.stats(below=second.digest)
        both = self.client.freed(self.repository, [first.digest, second.digest, f"sha256:{'0' * 64}"])
        self.assertEqual(both.snapshots, 2)
        self.assertGreater(both.bytes, sum(one.exclusive_bytes for one in stats.snapshots))
        with self.refused("invalid_request|invalid_name"):
            self.client.freed(self.repository, ["one"])
        detail = self.client.snapshot(self.repository, "two")
        self.assertEqual((detail.config["parents"], detail.summary.tags), ([first.digest], ["two"]))
        self.assertEqual(detail.trees[0]["sequences"][0]["id"], "main")

    def test_tags_move_by_compare_and_swap_and_lists_are_read_to_their_end(self) -> None:
        first = self.client.push(self.directory("one", 2), self.repository).digest
        second = self.client.push(self.directory("two", 3), self.repository, "two").digest
        self.assertEqual(self.client.tag(self.repository, "latest").digest, first)
        with self.refused("tag_moved"):
            self.client.put_tag(self.repository, "latest", "two", if_tag_is="absent")
        with self.refused("tag_moved"):
            self.client.push(self.folder / "two", self.repository, if_tag_is=second)
        moved = self.client.put_tag(self.repository, "latest", "two", if_tag_is=first)
        self.assertEqual((moved.name, moved.digest, moved.updated_at.utcoffset() is None), ("latest", second, False))
        forks = self.client.fork(self.repository, "two", 1100, "try")
        self.assertEqual((forks.digest, forks.tags[:2], len(forks.tags)), (second, ["try-1", "try-2"], 1100))
        self.assertEqual(len(list(self.client.tags(self.repository))), 1102)
        self.assertEqual([one.digest for one in self.client.snapshots(self.repository)], [second, first])
        found = {one.name: one for one in self.client.repositories()}[self.repository]
        self.assertEqual((found.snapshots, found.tags), (2, 1102))

    def test_a_snapshot_is_deleted_if_its_tags_are_those_that_were_seen(self) -> None:
        digest = self.client.push(self.directory("one", 2), self.repository, "b").digest
        self.client.put_tag(self.repository, "a", "b")
        with self.refused("tag_moved"):
            self.client.delete_tag(self.repository, "a", if_tag_is=f"sha256:{'0' * 64}")
        with self.refused("tag_moved"):
            self.client.delete_snapshot(self.repository, digest, if_tags_are=["b"])
        with self.refused("invalid_request"):
            self.client.delete_snapshot(self.repository, digest[:20], if_tags_are=["a", "b"])
        self.client.delete_snapshot(self.repository, digest, if_tags_are=["b", "a"])
        with self.refused("repository_unknown") as raised:
            self.client.tag(self.repository, "a")
        self.assertEqual((raised.exception.status, raised.exception.retryable), (404, False))
        self.client.push(self.folder / "one", self.repository, "b")
        self.client.delete_tag(self.repository, "b", if_tag_is=digest)
        self.assertEqual([one.tags for one in self.client.snapshots(self.repository)], [[]])
        self.client.delete_snapshot(self.repository, digest)

    def test_the_longest_prefix_is_found(self) -> None:
        short = self.client.push(synthetic(self.folder / "short", 40), self.repository, "short")
        long = self.client.push(synthetic(self.folder / "long", 70), self.repository, "long")
        tokens = array.array("I", (self.folder / "long" / "tokens.bin").read_bytes())
        fingerprint = self.client.snapshot(self.repository, "long").config["fingerprint"]
        found = self.client.match(self.repository, [*tokens, 1, 2, 3], fingerprint)
        self.assertEqual((found.digest, found.boundary, found.tokens, found.truncated), (long.digest, 70, 70, False))
        self.assertEqual(self.client.match(self.repository, tokens[:40], fingerprint).boundary, 40)
        none = self.client.match(self.repository, [1, 2, 3], fingerprint)
        self.assertEqual((none.digest, none.boundary), (None, 0))
        self.assertIn(none.rejected[0].digest, (short.digest, long.digest))

    def test_events_are_those_since_an_id(self) -> None:
        self.client.push(self.directory("one", 2), self.repository, "one")
        follower, is_seen = self.client.events(self.repository), threading.Event()

        def change() -> None:
            """Until the stream has begun: what was before is not sent."""
            number = 0
            while not is_seen.wait(0.05):
                number += 1
                self.client.put_tag(self.repository, f"two-{number}", "one")

        changes = threading.Thread(target=change)
        changes.start()
        try:
            first = next(follower)
        finally:
            is_seen.set()
            changes.join()
        assert isinstance(first, Event) and first.tag is not None
        self.assertEqual((first.kind, first.repository, first.tag[:4]), ("tagged", self.repository, "two-"))
        self.client.delete_tag(self.repository, first.tag)
        self.client.put_tag(self.repository, "three", "one")
        since = list(self.client.events(self.repository, after=first.id, follow=False))
        self.assertEqual(
            [(one.kind, one.tag) for one in since if isinstance(one, Event)][-2:], [("deleted", first.tag), ("tagged", "three")]
        )
        self.assertEqual([next(follower) for _ in since], since)
        follower.close()
        tagged = self.client.events(self.repository, kind="tagged", after=first.id, follow=False)
        self.assertEqual(list(tagged), [one for one in since if one.kind == "tagged"])
        elsewhere = next(self.client.events(after=f"{'0' * 32}-1", follow=False))
        self.assertIsInstance(elsewhere, Reset)
        with self.refused("invalid_name|invalid_request"):
            list(self.client.events(kind="renamed", follow=False))  # type: ignore[arg-type]

    def test_signatures_retention_usage_and_exports(self) -> None:
        digest = self.client.push(self.directory("one", 2), self.repository, "one").digest
        key = self.folder / "key"
        subprocess.run([PF, "keygen", str(key)], check=True, capture_output=True)
        with self.refused("signature_required"):
            self.client.verify_signature(self.repository, "one", f"{key}.pub")
        signed = self.client.sign(self.repository, "one", key)
        self.assertEqual(self.client.verify_signature(self.repository, "one", f"{key}.pub").key_id, signed.key_id)
        self.assertEqual([one.snapshot for one in self.client.signatures(self.repository)], [digest])
        self.assertEqual(self.client.verify(self.repository, "one").digest, digest)
        self.assertGreater(self.client.usage().disk_bytes, 0)
        run = self.client.run_retention(dry_run=True)
        self.assertEqual((self.client.retention(), run.dry_run, run.snapshots, run.deleted, run.complete), ([], True, 0, [], True))
        exports = self.client.export(self.repository, ["one"], str(self.folder / "exported"))
        self.assertEqual([(one.digest, one.pages) for one in exports], [(digest, 2)])


class Refusals(Case):
    def test_errors_of_pf_and_of_the_registry_are_one_class(self) -> None:
        with self.refused("tag_unknown|repository_unknown"):
            self.client.pull(self.repository, "absent", self.folder / "back")
        (self.folder / "empty").mkdir()
        with self.assertRaises(Error) as raised:
            self.client.push(self.folder / "empty", self.repository)
        self.assertIn("page_manifest.json", raised.exception.message)
        with self.refused("invalid_name"):
            self.client.tag("Upper", "a")
        with self.refused("not_found"):
            Client(registry.url, program="no-such-program").pull(self.repository, "a", self.folder / "back")
        with self.refused("unavailable"):
            Client("http://127.0.0.1:1", retries=0).stats()
        with self.refused("unavailable") as refused:
            Client("http://127.0.0.1:1", retries=0, program=PF).pull(self.repository, "a", self.folder / "back")
        self.assertTrue(refused.exception.retryable)

    def test_a_token_opens_what_it_is_for_in_python_and_in_pf(self) -> None:
        guarded = Registry("--require-tokens")
        self.addCleanup(guarded.stop)
        token = guarded.token("tests/*:pull,push")
        with self.refused("unauthorized"):
            next(Client(guarded.url, retries=0).repositories())
        client = Client(guarded.url, token=token, program=PF)
        client.push(self.directory("one", 2), self.repository)
        self.assertEqual([one.name for one in client.repositories()], [self.repository])
        with self.refused("denied"):
            client.delete_tag(self.repository, "latest")
        with mock.patch.dict(os.environ, {"PF_REGISTRY": guarded.url, "PF_TOKEN": token}):
            self.assertEqual(Client().tag(self.repository, "latest").name, "latest")

    def test_a_snapshot_that_is_none_is_not_written(self) -> None:
        whole = (page(0, "k"), page(0, "v"))
        one = {"main": Sequence([0], 16)}
        for pages, sequences, words in [
            ([(page(0, "k"), b"short")], one, "v of page 0 has 5 bytes"),
            ([whole], {"main": Sequence([0], 17)}, "17 tokens need 2"),
            ([whole], {"main": Sequence([1], 3)}, "names page 1"),
        ]:
            with self.assertRaisesRegex(Error, words):
                write_snapshot(self.folder / "wrong", GEOMETRY, pages, sequences)
        self.assertFalse((self.folder / "wrong" / "page_manifest.json").exists())
        with self.assertRaisesRegex(Error, "token id"):
            write_snapshot(self.folder / "wrong", GEOMETRY, [whole], one, tokens=[1 << 32])
        with self.assertRaisesRegex(Error, "attachment"):
            write_snapshot(self.folder / "wrong", GEOMETRY, [whole], one, attachments={"../x": b""})
        write_snapshot(self.folder / "right", GEOMETRY, [whole], one, config={"agent": "ä"}, attachments={"notes.txt": b"x"})
        with self.assertRaisesRegex(Error, "already"):
            write_snapshot(self.folder / "right", GEOMETRY, [whole], one)
        self.client.push(self.folder / "right", self.repository)
        detail = self.client.snapshot(self.repository, "latest")
        titles = [layer.get("annotations", {}).get("org.opencontainers.image.title") for layer in detail.manifest["layers"]]
        self.assertEqual((detail.config["agent"], titles[-1]), ("ä", "notes.txt"))
