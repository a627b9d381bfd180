-- The last report of each capture agent, for the page of the fleet. label: the label of the token
-- with which it came. report: the report as JSON.
CREATE TABLE agents (
  name    text COLLATE "C" PRIMARY KEY,
  seen_at bigint NOT NULL,
  label   text,
  report  text   NOT NULL
);
