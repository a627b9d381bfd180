-- The last report of each capture agent, for the page of the fleet. label: the label of the token
-- with which it came. report: the report as JSON.
CREATE TABLE agents (
  name    TEXT    PRIMARY KEY,
  seen_at INTEGER NOT NULL,
  label   TEXT,
  report  TEXT    NOT NULL
) WITHOUT ROWID;
