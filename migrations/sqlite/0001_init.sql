-- Metadata of a store. Times are milliseconds since 1970, digests are the algorithm number and the
-- digest's bytes. migrations/postgres has the same tables; docs/gc.md says what keeps them true.

-- Immutable files of many frames. The row is written before the upload starts, so debris of a crash
-- has a name. keep_until: the lease of the upload. draining_since: when the last pointer to it
-- went. claimed_until: until when a compaction has it.
CREATE TABLE packs (
  id             INTEGER PRIMARY KEY AUTOINCREMENT,
  key            TEXT    NOT NULL UNIQUE,
  state          TEXT    NOT NULL CHECK (state IN ('writing', 'live', 'draining')),
  bytes          INTEGER NOT NULL DEFAULT 0,
  frame_bytes    INTEGER NOT NULL DEFAULT 0,
  live_bytes     INTEGER NOT NULL DEFAULT 0 CHECK (live_bytes >= 0),
  keep_until     INTEGER NOT NULL,
  draining_since INTEGER,
  claimed_until  INTEGER NOT NULL DEFAULT 0
);
-- Small indexes of what collection has to do: it never looks at packs that are well.
CREATE INDEX packs_writing  ON packs (keep_until) WHERE state = 'writing';
CREATE INDEX packs_empty    ON packs (id) WHERE state = 'live' AND live_bytes = 0;
CREATE INDEX packs_sparse   ON packs (live_bytes) WHERE state = 'live' AND live_bytes > 0 AND live_bytes * 2 < frame_bytes;
CREATE INDEX packs_draining ON packs (draining_since) WHERE state = 'draining';

-- One row a blob. refs counts the stored nodes, manifests and tags that list it; keep_until is
-- the longest lease on it. health: 0 whole, 1 a node that reaches something damaged, 2
-- damaged.
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
  codec      INTEGER NOT NULL,
  health     INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX objects_digest ON objects (domain, digest);
CREATE INDEX objects_pack ON objects (pack);
CREATE INDEX objects_unwell ON objects (id) WHERE health > 0;

-- Why an object is quarantined.
CREATE TABLE damage (
  object   INTEGER PRIMARY KEY REFERENCES objects (id) ON DELETE CASCADE,
  reason   TEXT    NOT NULL,
  found_at INTEGER NOT NULL
);

-- A row for each time that something became well: nodes above it are to be looked at again.
CREATE TABLE healed (
  id INTEGER PRIMARY KEY
);

-- One row a node. children is the sorted list of object ids, each once, as varint differences.
-- pages, components and page_bytes are a run's shape. logical_bytes is what it reaches; new_bytes
-- is what it was the first to hold.
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

-- A manifest in a repository: a snapshot. used_at and pinned are what eviction from a local store
-- goes by. pinned: 0, or the sum of the reasons: 1 by hand, 2 until it is pushed.
CREATE TABLE manifests (
  id            INTEGER PRIMARY KEY AUTOINCREMENT,
  repository    INTEGER NOT NULL REFERENCES repositories (id),
  object        INTEGER NOT NULL REFERENCES objects (id),
  artifact_type TEXT,
  subject       BLOB,
  pushed_at     INTEGER NOT NULL,
  used_at       INTEGER NOT NULL,
  pinned        INTEGER NOT NULL DEFAULT 0,
  logical_bytes INTEGER NOT NULL,
  new_bytes     INTEGER NOT NULL,
  UNIQUE (repository, object)
);
-- Also what makes the deletion of an object a look-up and not a scan.
CREATE INDEX manifests_object ON manifests (object);
CREATE INDEX manifests_used ON manifests (used_at) WHERE pinned = 0;

-- Parents by digest: a parent need not be in the repository.
CREATE TABLE parents (
  manifest INTEGER NOT NULL REFERENCES manifests (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  digest   BLOB    NOT NULL,
  PRIMARY KEY (manifest, position)
) WITHOUT ROWID;

-- followed: it was put where an upstream has it, and nobody moved it here since.
CREATE TABLE tags (
  repository INTEGER NOT NULL REFERENCES repositories (id),
  name       TEXT    NOT NULL,
  manifest   INTEGER NOT NULL REFERENCES manifests (id),
  updated_at INTEGER NOT NULL,
  followed   INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (repository, name)
) WITHOUT ROWID;
CREATE INDEX tags_manifest ON tags (manifest);

-- Push sessions: leases. A committed one stays until its lease ends, so that a commit whose answer
-- was lost can be asked for again.
CREATE TABLE pushes (
  id         TEXT    PRIMARY KEY,
  repository INTEGER NOT NULL REFERENCES repositories (id),
  expires    INTEGER NOT NULL,
  committed  BLOB,
  created    INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX pushes_expires ON pushes (expires);

-- The queue garbage collection works from: objects that may be free, and packs whose unclaimed
-- objects may be.
CREATE TABLE suspects (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  due    INTEGER NOT NULL,
  object INTEGER,
  pack   INTEGER,
  CHECK ((object IS NULL) <> (pack IS NULL))
);
CREATE INDEX suspects_due ON suspects (due);

-- What collection did, and why.
CREATE TABLE gc_runs (
  id          TEXT    PRIMARY KEY,
  cause       TEXT    NOT NULL,
  started_at  INTEGER NOT NULL,
  finished_at INTEGER,
  report      TEXT    NOT NULL
) WITHOUT ROWID;

-- Changes of names on their way into the journal, and the journal's objects.
CREATE TABLE changes (
  seq    INTEGER PRIMARY KEY AUTOINCREMENT,
  record TEXT    NOT NULL
);
CREATE TABLE journal (
  key           TEXT    PRIMARY KEY,
  first_seq     INTEGER NOT NULL,
  last_seq      INTEGER NOT NULL,
  is_checkpoint INTEGER NOT NULL,
  records       INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX journal_order ON journal (is_checkpoint, last_seq, key);
