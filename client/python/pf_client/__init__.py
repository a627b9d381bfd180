"""A registry of snapshots of live model state, from Python: for fleet tooling and notebooks.

`Client` asks the registry in JSON, and lets the program `pf` move pages. `write_snapshot` writes a
snapshot directory that can be pushed. docs/python.md has examples.
"""

from .client import Client
from .directory import Geometry, Sequence, write_snapshot
from .errors import Error
from .model import (
    Detail,
    Forks,
    Lineage,
    Match,
    Pulled,
    Pushed,
    Rejected,
    Repository,
    Snapshot,
    SnapshotStats,
    Stats,
    Tag,
)

__version__ = "0.1.0"

__all__ = [
    "Client",
    "Detail",
    "Error",
    "Forks",
    "Geometry",
    "Lineage",
    "Match",
    "Pulled",
    "Pushed",
    "Rejected",
    "Repository",
    "Sequence",
    "Snapshot",
    "SnapshotStats",
    "Stats",
    "Tag",
    "write_snapshot",
]
