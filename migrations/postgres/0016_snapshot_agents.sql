-- agent: whom the configuration of a snapshot names as its agent; empty if nobody. NULL until it is
-- read: of snapshots that an older version committed or a rebuild brought back, by the first
-- question about agents in their repository.
ALTER TABLE manifests ADD COLUMN agent text;
