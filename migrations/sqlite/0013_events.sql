-- Events: what happened, for those that follow it. A change goes from `changes` into this table in
-- the transaction that records its journal object, so rows become visible in the order of their
-- numbers. noted_at: when. is_name: record is a change of names, as in the journal; otherwise it is
-- the report of a collection.
CREATE TABLE events (
  number   INTEGER PRIMARY KEY,
  noted_at INTEGER NOT NULL,
  is_name  INTEGER NOT NULL DEFAULT 1,
  record   TEXT    NOT NULL
);
CREATE INDEX events_noted ON events (noted_at);

-- One row from the first reader on, or none: then nothing is kept in `events`. epoch: numbers mean
-- nothing without it; a rebuild begins another one. forgotten: the greatest number that is not kept
-- any more.
CREATE TABLE event_log (
  id        INTEGER PRIMARY KEY CHECK (id = 1),
  epoch     TEXT    NOT NULL,
  forgotten INTEGER NOT NULL
);

-- Not is_name: the report of a collection, which goes to `events` and not into the journal.
ALTER TABLE changes ADD COLUMN is_name INTEGER NOT NULL DEFAULT 1;
