-- A lease belongs to a push session: what a session uploaded, or was told is present, is kept while
-- that session lives.

-- number: sessions in the order in which they were opened. AUTOINCREMENT: no number is used twice.
CREATE TABLE numbered_pushes (
  number     INTEGER PRIMARY KEY AUTOINCREMENT,
  id         TEXT    NOT NULL UNIQUE,
  repository INTEGER NOT NULL REFERENCES repositories (id),
  expires    INTEGER NOT NULL,
  committed  BLOB,
  created    INTEGER NOT NULL DEFAULT 0
);
INSERT INTO numbered_pushes (id, repository, expires, committed, created)
  SELECT id, repository, expires, committed, created FROM pushes ORDER BY expires, id;
DROP TABLE pushes;
ALTER TABLE numbered_pushes RENAME TO pushes;
CREATE INDEX pushes_expires ON pushes (expires);
CREATE INDEX pushes_open ON pushes (number) WHERE committed IS NULL;

-- lessee: which sessions lease the object. 0: none; N: session N alone; -N: several, none of them
-- newer than session N. keep_until is for leases that belong to no session: a node of unknown
-- content, a pack that a rebuild took in.
ALTER TABLE objects ADD COLUMN lessee INTEGER NOT NULL DEFAULT 0;

-- session: the entry is due as soon as that session ends. released: the object was part of a
-- snapshot or tag that was deleted. Not released: it was uploaded and never committed.
ALTER TABLE suspects ADD COLUMN session INTEGER;
ALTER TABLE suspects ADD COLUMN released INTEGER NOT NULL DEFAULT 0;
UPDATE suspects SET released = 1 WHERE object IS NOT NULL;
DROP INDEX suspects_due;
CREATE INDEX suspects_due ON suspects (released, due);
CREATE INDEX suspects_session ON suspects (session) WHERE session IS NOT NULL;
