"""What a registry answers. Times are UTC, sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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


def _text_time(text: str) -> datetime:
    """As the documents of `pf` have it."""
    return datetime.fromisoformat(text)


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
    """What one snapshot costs. Deleting it would free `exclusive_bytes`. Older registries do not
    say when it was pushed."""

    repository: str
    digest: str
    tags: list[str]
    parents: list[str]
    logical_bytes: int = _named("logical")
    new_bytes: int = _named("new")
    shared_bytes: int = _named("shared")
    exclusive_bytes: int = _named("exclusive")
    pushed_at: datetime | None = field(default=None, metadata={"read": _time})


@dataclass(frozen=True, slots=True)
class Stats:
    """How much snapshots share. `snapshots` lists the last 10,000, oldest first; `omitted` counts
    the others. `below` and `agent` say which snapshots it is about."""

    dedup_ratio: float
    codec_ratio: float
    logical_bytes: int = _named("logical")
    unique_bytes: int = _named("unique")
    stored_bytes: int = _named("stored")
    disk_bytes: int = _named("disk")
    snapshots: list[SnapshotStats] = _list(lambda found: parse(SnapshotStats, found))
    omitted: int = 0
    below: str | None = None
    agent: str | None = None


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


EventKind = Literal["pushed", "tagged", "deleted", "collected"]
"""What happened: a snapshot was pushed, a tag made or moved, a tag or snapshot deleted, or a
collection freed something."""


@dataclass(frozen=True, slots=True)
class EventCollection:
    """What a collection freed."""

    run: str
    objects: int
    freed_bytes: int
    deleted_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `id` is the one to go on after. A collection has no repository, and
    a tag that was deleted no digest: its snapshot stays."""

    id: str
    kind: EventKind
    at: datetime = _at()
    repository: str | None = None
    tag: str | None = None
    digest: str | None = None
    parents: list[str] = field(default_factory=list)
    artifact_type: str | None = None
    new_bytes: int | None = None
    collection: EventCollection | None = field(
        default=None, metadata={"read": lambda found: None if found is None else parse(EventCollection, found)}
    )


@dataclass(frozen=True, slots=True)
class Reset:
    """Events before this point are not known any more. Read the lists again: what you know of the
    registry may be out of date. From `id` on there is no gap."""

    id: str
    reason: str
    kind: Literal["reset"] = "reset"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read and hashed. `values_attested` of the checkpoint tensors could not be computed
    again."""

    digest: str
    blobs: int
    bytes: int
    stored_bytes: int = 0
    values_computed: int = 0
    values_attested: int = 0


@dataclass(frozen=True, slots=True)
class Signed:
    """A good signature of a snapshot. `key_id` is the SHA-256 of the public key."""

    digest: str
    key_id: str
    signed_at: datetime | None = field(default=None, metadata={"read": lambda found: None if found is None else _text_time(found)})


@dataclass(frozen=True, slots=True)
class SignatureManifest:
    """A manifest with signatures, and the snapshot that it is for, which need not be there."""

    manifest: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class DeletedSnapshot:
    """A snapshot that a run of retention deleted, or would delete, and the policy that says so."""

    repository: str
    digest: str
    tags: list[str]
    logical_bytes: int
    pushed_at: datetime = _at()
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """What deleting snapshots, all together, would free: raw bytes, and the same as stored."""

    snapshots: int
    bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Retention:
    """A run of retention. `snapshots` counts what was deleted, `deleted` lists the first 10,000,
    `kept` counts what stays. Not `complete`: the next run goes on. `freed`: what a dry run would
    free; registries do not say it of more than 100,000 snapshots, and older ones never."""

    dry_run: bool
    snapshots: int
    kept: int
    complete: bool
    deleted: list[DeletedSnapshot] = _list(lambda found: parse(DeletedSnapshot, found))
    freed: Freed | None = field(default=None, metadata={"read": lambda found: parse(Freed, found)})


@dataclass(frozen=True, slots=True)
class Usage:
    """What takes up room, in bytes. All but `disk_bytes` add up to it."""

    disk_bytes: int
    live_bytes: int
    garbage_bytes: int
    dead_bytes: int
    draining_bytes: int
    snapshots: int
    leased_bytes: int = field(metadata={"name": "leased", "read": lambda found: int(found["bytes"])})
    unfinished_bytes: int = field(default=0, metadata={"name": "unfinished", "read": lambda found: int(found["bytes"])})


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the agent of this host, as docs/capture.md has it. `warm` and `drain` are its plan
    and its results. `error` is its first failure, `note` the reason why it waits."""

    id: str
    state: Literal["planned", "running", "done", "failed", "cancelled", "interrupted"]
    request: dict[str, Any]
    started_at: datetime = field(metadata={"read": _text_time})
    bytes_done: int = _named("done_bytes")
    bytes_total: int = _named("total_bytes")
    seconds_left: float | None = None
    note: str | None = None
    error: dict[str, Any] | None = None
    warm: dict[str, Any] | None = None
    drain: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """What there is to capture on a host, at most `bytes`, what of it the registry has now, and
    what failed. `recompute_seconds` is known if the request gave a speed."""

    bytes: int
    recompute_tokens: int
    plan: list[dict[str, Any]]
    done: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    recompute_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote. `manifest_digest` is that of the export, `digest` that of the
    snapshot."""

    digest: str
    manifest_digest: str
    pages: int
    packs: int
    packs_written: int
    raw_bytes: int
    written_bytes: int
    seconds: float
