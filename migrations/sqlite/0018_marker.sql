-- The id that the marker on the storage must have. One row, or none: then the marker decides, or
-- the store is new.
CREATE TABLE marker (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  id  TEXT    NOT NULL
);
