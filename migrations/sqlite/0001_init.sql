-- Metadata of a store. Times are milliseconds since 1970, digests are the algorithm number and the digest's bytes.

-- Immutable files of many frames. The row is written before the upload starts, so debris of a crash has a name.
CREATE TABLE packs (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  key        TEXT    NOT NULL UNIQUE,
  state      TEXT    NOT NULL CHECK (state IN ('writing', 'live', 'draining', 'dead')),
  bytes      INTEGER NOT NULL DEFAULT 0,
  live_bytes INTEGER NOT NULL DEFAULT 0 CHECK (live_bytes >= 0),
  keep_until INTEGER NOT NULL,
  dead_since INTEGER
);

-- One row a blob. refs counts the stored containers, manifests and tags that list it; keep_until is the longest lease on it.
CREATE TABLE objects (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  domain     INTEGER NOT NULL,
  digest     BLOB    NOT NULL,
  size       INTEGER NOT NULL,
  kind       INTEGER NOT NULL,
  refs       INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
  keep_until INTEGER NOT NULL,
  pack       INTEGER NOT NULL REFERENCES packs (id),
  offset     INTEGER NOT NULL,
  frame_len  INTEGER NOT NULL,
  codec      INTEGER NOT NULL
);
CREATE UNIQUE INDEX objects_digest ON objects (domain, digest);

-- One row a container. children is the sorted list of object ids, each once, as varint differences. pages, components and
-- page_bytes are a run's shape. logical_bytes is what it reaches; new_bytes is what it was the first to hold.
CREATE TABLE containers (
  object        INTEGER PRIMARY KEY REFERENCES objects (id),
  children      BLOB    NOT NULL,
  pages         INTEGER,
  components    INTEGER,
  page_bytes    INTEGER,
  logical_bytes INTEGER NOT NULL,
  new_bytes     INTEGER NOT NULL
);

CREATE TABLE repositories (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  domain INTEGER NOT NULL,
  name   TEXT    NOT NULL UNIQUE
);

-- A manifest in a repository: a snapshot.
CREATE TABLE manifests (
  id            INTEGER PRIMARY KEY AUTOINCREMENT,
  repository    INTEGER NOT NULL REFERENCES repositories (id),
  object        INTEGER NOT NULL REFERENCES objects (id),
  artifact_type TEXT,
  subject       BLOB,
  pushed_at     INTEGER NOT NULL,
  logical_bytes INTEGER NOT NULL,
  new_bytes     INTEGER NOT NULL,
  UNIQUE (repository, object)
);

-- Parents by digest: a parent need not be in the repository.
CREATE TABLE parents (
  manifest INTEGER NOT NULL REFERENCES manifests (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  digest   BLOB    NOT NULL,
  PRIMARY KEY (manifest, position)
) WITHOUT ROWID;

CREATE TABLE tags (
  repository INTEGER NOT NULL REFERENCES repositories (id),
  name       TEXT    NOT NULL,
  manifest   INTEGER NOT NULL REFERENCES manifests (id),
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (repository, name)
) WITHOUT ROWID;
CREATE INDEX tags_manifest ON tags (manifest);

-- Push sessions: leases.
CREATE TABLE pushes (
  id         TEXT    PRIMARY KEY,
  repository INTEGER NOT NULL REFERENCES repositories (id),
  expires    INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX pushes_expires ON pushes (expires);

-- The queue garbage collection works from: objects that may be free, and packs whose leases may have ended.
CREATE TABLE suspects (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  due    INTEGER NOT NULL,
  object INTEGER,
  pack   INTEGER,
  CHECK ((object IS NULL) <> (pack IS NULL))
);
CREATE INDEX suspects_due ON suspects (due);
