-- Processes of the version before events may go on beside newer ones: they copy every row of
-- `changes` into the journal and delete it, and know neither `events` nor `is_name`.

-- Reports of collections on their way to `events`, with numbers among those of changes. They wait
-- here, and not in `changes`, where such a process could not read them.
CREATE TABLE collections (
  number bigint PRIMARY KEY,
  record text   NOT NULL
);
INSERT INTO collections (number, record) SELECT seq, record FROM changes WHERE NOT is_name;
DELETE FROM changes WHERE NOT is_name;

-- What is deleted from `changes` is in the journal: it is an event, whichever version deletes it.
-- Reports with smaller numbers come first.
CREATE FUNCTION changes_are_events() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  newest bigint := (SELECT max(seq) FROM gone WHERE is_name);
  moment bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
BEGIN
  IF newest IS NOT NULL AND EXISTS (SELECT 1 FROM event_log) THEN
    INSERT INTO events (number, noted_at, is_name, record)
      SELECT number, moment, false, record FROM collections WHERE number < newest ON CONFLICT (number) DO NOTHING;
    DELETE FROM collections WHERE number < newest;
    INSERT INTO events (number, noted_at, is_name, record)
      SELECT seq, moment, true, record FROM gone WHERE is_name ON CONFLICT (number) DO NOTHING;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER changes_are_events AFTER DELETE ON changes
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION changes_are_events();
