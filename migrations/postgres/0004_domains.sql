-- A domain is a store of its own, with tables of its own in a schema of its own: no row names its
-- domain.
ALTER TABLE objects DROP COLUMN domain;
CREATE UNIQUE INDEX objects_digest ON objects (digest);
ALTER TABLE repositories DROP COLUMN domain;

-- The domains of a registry but the default one, in whose store this table is. deleting_since: from
-- then on nobody may use it. emptied_at: its tables and bytes were gone for the first time.
-- swept_at: they were deleted once more, after the longest upload; nobody deletes any more since.
-- When the slowest process has noticed that, the row goes.
CREATE TABLE domains (
  name           text COLLATE "C" PRIMARY KEY,
  created_at     bigint NOT NULL,
  deleting_since bigint,
  emptied_at     bigint,
  swept_at       bigint
);
