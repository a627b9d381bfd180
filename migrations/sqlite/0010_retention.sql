-- The retention policies of this domain: one row, or none. version: how often they were set, so that
-- no deletion follows policies that are not those any more. document: the policies as JSON.
CREATE TABLE retention (
  id       INTEGER PRIMARY KEY CHECK (id = 1),
  version  INTEGER NOT NULL,
  document TEXT    NOT NULL
);
