-- An index over all snapshots of a repository by the prefix of tokens that their state belongs to.

-- prefixed: the rows of this snapshot in prefixes are written. Those of snapshots that were
-- committed before this migration, or that a rebuild brought back, are written by a background
-- task.
ALTER TABLE manifests ADD COLUMN prefixed boolean NOT NULL DEFAULT false;
CREATE INDEX manifests_unprefixed ON manifests (id) WHERE NOT prefixed;

-- key: 64 bits of the prefix key at a position that a search looks at; the snapshot ends there or
-- passes it. tokens: where it ends, -1 if it passes. proof: 64 bits of the key of all its tokens, 0
-- if it passes.
CREATE TABLE prefixes (
  repository bigint NOT NULL,
  key        bigint NOT NULL,
  tokens     bigint NOT NULL,
  proof      bigint NOT NULL,
  manifest   bigint NOT NULL REFERENCES manifests (id) ON DELETE CASCADE,
  PRIMARY KEY (repository, key, tokens, proof, manifest)
);
CREATE INDEX prefixes_manifest ON prefixes (manifest);
