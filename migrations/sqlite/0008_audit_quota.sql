-- The audit log of this domain; that of the registry itself is in the tables of the domain
-- `default`. number: the order of the records. token, repository: what lists are filtered by.
-- of_registry: it is about the registry, and not for the operators of the domain `default`. record:
-- the record as JSON, without number and time. AUTOINCREMENT: no number is used twice.
CREATE TABLE audit_log (
  number      INTEGER PRIMARY KEY AUTOINCREMENT,
  noted_at    INTEGER NOT NULL,
  token       TEXT,
  repository  TEXT,
  of_registry INTEGER NOT NULL DEFAULT 0,
  record      TEXT    NOT NULL
);
CREATE INDEX audit_log_noted ON audit_log (noted_at);

-- The quota of this domain: one row, or none. used_*: what the tables hold. It is counted when the
-- row is made, and every change keeps it exact while the row is there.
CREATE TABLE quota (
  id             INTEGER PRIMARY KEY CHECK (id = 1),
  bytes          INTEGER,
  objects        INTEGER,
  snapshots      INTEGER,
  used_bytes     INTEGER NOT NULL,
  used_objects   INTEGER NOT NULL,
  used_snapshots INTEGER NOT NULL
);
