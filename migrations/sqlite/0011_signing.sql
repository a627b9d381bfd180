-- The signing policies of this domain: one row, or none. version: how often they were set, so that a
-- tag is put by a check of the policies that hold then. document: the policies as JSON.
CREATE TABLE signing (
  id       INTEGER PRIMARY KEY CHECK (id = 1),
  version  INTEGER NOT NULL,
  document TEXT    NOT NULL
);
