"""Which adapter a request uses: the digest of its files, not its name. A retrained adapter keeps
its name."""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pf_connector import files, identity

log = logging.getLogger("pf_connector")

UNIDENTIFIED = "unidentified:"
"""Begins the names of adapters that are not known."""


class Adapter:
    """One adapter, as the engine loaded it first."""

    def __init__(self, lora: Any) -> None:
        self.name = str(lora.lora_name)
        self._path = str(lora.lora_path)
        self._place: Path | None = None
        self._stamps: list[str] = []
        self._digest: Future[str] = Future()
        threading.Thread(target=self._read, name="pf-adapter", daemon=True).start()

    @property
    def settled(self) -> bool:
        """Whether `digest` answers at once."""
        return self._digest.done()

    @property
    def digest(self) -> str:
        """`sha256:…`; if the files cannot be identified, a text that equals no other, so nothing
        is ever found under it."""
        return self._digest.result()

    @property
    def changed(self) -> bool:
        """Whether the files are not those that were read: the engine may have loaded either."""
        if not self.settled or self._place is None:
            return False
        try:
            return self._stamps != _look(self._place)
        except OSError:
            # Deleted after loading: the engine has what was read.
            return False

    def _read(self) -> None:
        try:
            place = _place(self._path)
            stamps = _look(place)
            digest = identity.adapter(place)
            if stamps != _look(place):
                raise files.Changed(f"{place} changed while it was read")
            self._place, self._stamps = place, stamps
            log.info("adapter %s is %s", self.name, digest)
        except Exception as error:
            digest = unidentified()
            log.warning("adapter %s: %s; snapshots of its requests fit no request", self.name, error)
        self._digest.set_result(digest)


class Adapters:
    """The adapters of the requests that came, by the engine's number and path."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Adapter | None] = {}
        self._lock = threading.Lock()

    def settled(self, lora: Any) -> bool:
        """Whether the adapter of a request that has come is identified. Begins to read its files
        when it is seen first."""
        key = _key(lora)
        with self._lock:
            if key not in self._known:
                self._known[key] = Adapter(lora)
            found = self._known[key]
            if found is not None and found.changed:
                if getattr(lora, "load_inplace", False):
                    found = self._known[key] = Adapter(lora)
                else:
                    log.warning("adapter %s: its files changed while it is in use; snapshots of its requests fit no request", found.name)
                    found = self._known[key] = None
        return found is None or found.settled

    def digest(self, lora: Any) -> str:
        """The adapter's digest; waits while its files are read."""
        self.settled(lora)
        found = self._known[_key(lora)]
        return unidentified() if found is None else found.digest


def unidentified() -> str:
    """The name of an adapter that is not known: equal to no other."""
    return f"{UNIDENTIFIED}{uuid.uuid4()}"


def _key(lora: Any) -> tuple[int, str]:
    return int(lora.lora_int_id), str(lora.lora_path)


def _look(place: Path) -> list[str]:
    return [files.stamp(file) for file in identity.adapter_files(place)]


def _place(path: str) -> Path:
    """Where vLLM reads an adapter: a folder, or a repository of the hub in the local cache."""
    found = Path(path).expanduser()
    if found.exists():
        return found
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
