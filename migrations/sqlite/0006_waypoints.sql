-- Snapshots that may be resumed before their end get waypoints: rows in prefixes with tokens -2. The
-- background task that completes the index writes those of all snapshots that are here.
UPDATE manifests SET prefixed = 0;
