"""What a registry answers. Times are UTC, sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import Error

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse(kind: type[T], found: dict[str, Any]) -> T:
    """An answer as one of the classes here. Fields that it does not know are left out: answers of
    newer registries have more of them."""
    values: dict[str, Any] = {}
    try:
        for known in fields(kind):
            name = known.metadata.get("name", known.name)
            if name in found:
                read: Callable[[Any], Any] | None = known.metadata.get("read")
                values[known.name] = read(found[name]) if read else found[name]
        return kind(**values)
    except (LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise Error("unavailable", f"the answer is not that of a registry: {error}") from None


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _at() -> Any:
    return field(metadata={"read": _time})


def _named(name: str) -> Any:
    return field(metadata={"name": name})


def _list(read: Callable[[Any], Any]) -> Any:
    return field(metadata={"read": lambda found: [read(one) for one in found]})


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository in a list."""

    name: str
    snapshots: int
    tags: int
    updated_at: datetime = _at()


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, and the digest of the snapshot that it points at."""

    name: str
    digest: str
    updated_at: datetime = _at()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in a list. `new_bytes` were new in the domain when it was pushed."""

    digest: str
    tags: list[str]
    parents: list[str]
    logical_bytes: int
    new_bytes: int
    pushed_at: datetime = _at()


@dataclass(frozen=True, slots=True)
class Detail:
    """A snapshot with its documents, as docs/formats.md has them."""

    manifest: dict[str, Any]
    config: dict[str, Any]
    trees: list[dict[str, Any]]
    summary: Snapshot = field(metadata={"read": lambda found: parse(Snapshot, found)})


@dataclass(frozen=True, slots=True)
class Lineage:
    """A snapshot and its ancestors, nearest first. `truncated`: there are more of them."""

    truncated: bool
    snapshots: list[Snapshot] = _list(lambda found: parse(Snapshot, found))


@dataclass(frozen=True, slots=True)
class Forks:
    """New tags, and the digest of the snapshot that they point at."""

    digest: str
    tags: list[str]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A snapshot that nearly matches: so many tokens agree, and why it does not match."""

    digest: str
    common: int
    reason: str


@dataclass(frozen=True, slots=True)
class Match:
    """The snapshot from which given tokens can be resumed, at `boundary`. Without a `digest` there
    is none. `truncated`: the search ended at its limit, and there may be a longer one."""

    boundary: int
    rejected: list[Rejected] = _list(lambda found: parse(Rejected, found))
    tokens: int = 0
    truncated: bool = False
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """What one snapshot costs. Deleting it would free `exclusive_bytes`."""

    repository: str
    digest: str
    tags: list[str]
    parents: list[str]
    pushed_at: datetime = _at()
    logical_bytes: int = _named("logical")
    new_bytes: int = _named("new")
    shared_bytes: int = _named("shared")
    exclusive_bytes: int = _named("exclusive")


@dataclass(frozen=True, slots=True)
class Stats:
    """How much snapshots share. `snapshots` lists the last 10,000, oldest first; `omitted` counts
    the others."""

    dedup_ratio: float
    codec_ratio: float
    omitted: int
    logical_bytes: int = _named("logical")
    unique_bytes: int = _named("unique")
    stored_bytes: int = _named("stored")
    disk_bytes: int = _named("disk")
    snapshots: list[SnapshotStats] = _list(lambda found: parse(SnapshotStats, found))


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push sent. `created`: the repository did not have the snapshot before."""

    digest: str
    created: bool
    pages: int
    blobs_total: int
    blobs_sent: int
    raw_bytes: int
    deduplicated_bytes: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull fetched."""

    digest: str
    pages: int
    blobs_total: int
    blobs_received: int
    raw_bytes: int
    deduplicated_bytes: int
    received_bytes: int
    seconds: float
