"""SHA-256 of large files: read by several threads, once on a host, and remembered until a file
changes.

A file counts as unchanged while its device, inode, size, time of modification and time of change
are equal. The last of these cannot be set, so an edit that puts the old time of modification
back is seen too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("pf_connector")

_PIECE = 8 << 20
"""Bytes read at once."""
_THREADS = 4
"""Files read at once: the engine starts meanwhile, and needs disk and processors more."""
_NICE = 10
_SAY = 10.0
"""Seconds between two lines of progress."""
_SETTLED = 2.0
"""Seconds that a file must have been left alone to be remembered: within the tick of a file
system's clock an edit changes no time."""
_REMEMBERED = 20_000
"""Files whose digests are kept."""
_LOCKS = 64
_BLOB = re.compile(r"/blobs/([0-9a-f]{64})$")
_COMMIT = re.compile(r"/snapshots/[0-9a-f]{40}/")
_GB = 1e9


class Changed(OSError):
    """A file changed while it was read."""


@dataclass(frozen=True)
class _Read:
    """A file that was read."""

    stamp: str
    digest: str
    settled: bool


def digests(paths: Sequence[Path], what: str) -> list[str]:
    """SHA-256 of each file, in hex, in the order given. `what` names the files in the log. Raises
    `OSError`.

    Large files of the hub's cache are not read: the hub names them by their SHA-256, and the
    snapshot of a commit does not change.
    """
    found = {path: digest for path in paths if (digest := _hub_digest(path)) is not None}
    rest = [path for path in paths if path not in found]
    if rest:
        cache = _Cache(_cache_folder())
        # The processes of one engine start together: one of them reads, the others find what it
        # found.
        with cache.reading(rest, what):
            found |= cache.known(rest)
            lacking = [path for path in rest if path not in found]
            read = _read(lacking, what) if lacking else {}
            cache.remember([one for one in read.values() if one.settled])
            found |= {path: one.digest for path, one in read.items()}
    return [found[path] for path in paths]


def stamp(path: Path) -> str:
    """What stays equal while a file is unchanged. Raises `OSError`."""
    return _stamp(path.stat())


def _stamp(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _hub_digest(path: Path) -> str | None:
    if not path.is_symlink() or not _COMMIT.search(str(path.absolute())):
        return None
    blob = _BLOB.search(os.path.realpath(path))
    return blob[1] if blob else None


def _read(paths: Sequence[Path], what: str) -> dict[Path, _Read]:
    """Reads files, the largest first, and says how far it is."""
    sizes = {path: path.stat().st_size for path in paths}
    waiting = sorted(paths, key=lambda path: sizes[path])
    total, done = sum(sizes.values()), 0
    lock = threading.Lock()
    results: queue.SimpleQueue[tuple[Path, _Read] | OSError] = queue.SimpleQueue()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size

    def work() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with lock:
                if not waiting:
                    return
                path = waiting.pop()
            try:
                results.put((path, _hash(path, count)))
            except OSError as error:
                results.put(error)

    started = said = time.monotonic()
    for number in range(min(_THREADS, len(paths))):
        # Daemons: an engine that ends does not wait for them.
        threading.Thread(target=work, name=f"pf-read-{number}", daemon=True).start()
    found: dict[Path, _Read] = {}
    while len(found) < len(paths):
        with contextlib.suppress(queue.Empty):
            one = results.get(timeout=_SAY)
            if isinstance(one, OSError):
                with lock:
                    waiting.clear()
                raise one
            found[one[0]] = one[1]
        if time.monotonic() - said >= _SAY:
            said = time.monotonic()
            log.info("%s: %.1f of %.1f GB read", what, done / _GB, total / _GB)
    log.info("%s: read %d files, %.1f GB, in %.1f s", what, len(paths), total / _GB, time.monotonic() - started)
    return found


def _hash(path: Path, count: Callable[[int], None]) -> _Read:
    with path.open("rb", buffering=0) as file:
        before, began = os.fstat(file.fileno()), time.time()
        hasher, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
            count(size)
        after = os.fstat(file.fileno())
    if _stamp(before) != _stamp(after):
        raise Changed(f"{path} changed while it was read")
    return _Read(_stamp(before), hasher.hexdigest(), began - max(before.st_mtime, before.st_ctime) >= _SETTLED)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "pf"


class _Cache:
    """Digests by stamp, in a file that is replaced as a whole. Without a folder that can be
    written, nothing is remembered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "digests.json"

    @contextlib.contextmanager
    def reading(self, paths: Sequence[Path], what: str) -> Iterator[None]:
        """Held while these files are read. Waits for another process that reads the same."""
        place = hashlib.sha256("\n".join(sorted(stamp(path) for path in paths)).encode()).digest()[0] % _LOCKS
        with self._lock(f"reading-{place}.lock", f"{what}: another process reads the same files; waiting for it"):
            yield

    def known(self, paths: Sequence[Path]) -> dict[Path, str]:
        """The digests of those files that were read before and are unchanged."""
        entries = self._load()
        return {path: digest for path in paths if (digest := entries.get(stamp(path))) is not None}

    def remember(self, read: Sequence[_Read]) -> None:
        """Adds digests. A failure costs reading them again, so it is only logged."""
        if not read:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock("digests.lock", ""):
                entries = self._load() | {one.stamp: one.digest for one in read}
                self._store(dict(list(entries.items())[-_REMEMBERED:]))
        except OSError as error:
            log.warning("digests are not remembered in %s: %s", self._file, error)

    def _load(self) -> dict[str, str]:
        try:
            entries = json.loads(self._file.read_bytes())["sha256"]
            return {str(key): value for key, value in entries.items() if re.fullmatch("[0-9a-f]{64}", value)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _store(self, entries: dict[str, str]) -> None:
        descriptor, name = tempfile.mkstemp(prefix="digests.", dir=self._folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"sha256": entries}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._file)
        except BaseException:
            os.unlink(name)
            raise

    @contextlib.contextmanager
    def _lock(self, name: str, wait: str) -> Iterator[None]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            # Then each process reads for itself.
            yield
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if wait:
                    log.info("%s", wait)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
