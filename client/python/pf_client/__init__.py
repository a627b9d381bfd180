"""A registry of snapshots of live model state, from Python: for fleet tooling and notebooks.

`Client` asks the registry in JSON, and lets the program `pf` move pages. `write_snapshot` writes a
snapshot directory that can be pushed. docs/python.md has examples.
"""

from .client import Client
from .directory import Geometry, Sequence, write_snapshot
from .errors import Error
from .model import (
    DeletedSnapshot,
    Detail,
    Drain,
    Event,
    EventCollection,
    EventKind,
    Exported,
    Forks,
    Freed,
    Job,
    Lineage,
    Match,
    Pulled,
    Pushed,
    Rejected,
    Repository,
    Reset,
    Retention,
    SignatureManifest,
    Signed,
    Snapshot,
    SnapshotStats,
    Stats,
    Tag,
    Usage,
    Verified,
)

__version__ = "0.1.0"

__all__ = [
    "Client",
    "DeletedSnapshot",
    "Detail",
    "Drain",
    "Error",
    "Event",
    "EventCollection",
    "EventKind",
    "Exported",
    "Forks",
    "Freed",
    "Geometry",
    "Job",
    "Lineage",
    "Match",
    "Pulled",
    "Pushed",
    "Rejected",
    "Repository",
    "Reset",
    "Retention",
    "Sequence",
    "SignatureManifest",
    "Signed",
    "Snapshot",
    "SnapshotStats",
    "Stats",
    "Tag",
    "Usage",
    "Verified",
    "write_snapshot",
]
