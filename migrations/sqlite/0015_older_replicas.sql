-- Processes of the version before events may go on beside newer ones: they copy every row of
-- `changes` into the journal and delete it, and know neither `events` nor `is_name`.

-- Reports of collections on their way to `events`, with numbers among those of changes. They wait
-- here, and not in `changes`, where such a process could not read them.
CREATE TABLE collections (
  number INTEGER PRIMARY KEY,
  record TEXT    NOT NULL
);
INSERT INTO collections (number, record) SELECT seq, record FROM changes WHERE NOT is_name;
DELETE FROM changes WHERE NOT is_name;

-- What is deleted from `changes` is in the journal: it is an event, whichever version deletes it.
-- Reports with smaller numbers come first.
CREATE TRIGGER changes_are_events AFTER DELETE ON changes WHEN old.is_name AND EXISTS (SELECT 1 FROM event_log)
BEGIN
  INSERT OR IGNORE INTO events (number, noted_at, is_name, record)
    SELECT number, CAST(strftime('%s', 'now') AS INTEGER) * 1000, 0, record FROM collections WHERE number < old.seq;
  DELETE FROM collections WHERE number < old.seq;
  INSERT OR IGNORE INTO events (number, noted_at, is_name, record)
    VALUES (old.seq, CAST(strftime('%s', 'now') AS INTEGER) * 1000, 1, old.record);
END;
