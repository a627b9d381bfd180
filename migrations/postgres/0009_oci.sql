-- What the OCI API needs besides objects, snapshots and tags.

-- Blobs that a repository has: they were uploaded or mounted there, or one of its manifests lists
-- them. It holds nothing: an object goes when nothing lists or leases it.
CREATE TABLE repository_blobs (
  repository bigint NOT NULL REFERENCES repositories (id),
  object     bigint NOT NULL REFERENCES objects (id) ON DELETE CASCADE,
  PRIMARY KEY (repository, object)
);
CREATE INDEX repository_blobs_object ON repository_blobs (object);

-- is_image: an OCI manifest or index that was pushed as one, and no snapshot. linked: what it lists
-- is in repository_blobs. For snapshots, and after a rebuild, the first request for a blob that
-- is not found there writes it.
ALTER TABLE manifests ADD COLUMN is_image boolean NOT NULL DEFAULT false;
ALTER TABLE manifests ADD COLUMN linked boolean NOT NULL DEFAULT false;
CREATE INDEX manifests_unlinked ON manifests (repository) WHERE NOT linked;
CREATE INDEX manifests_subject ON manifests (repository, subject) WHERE subject IS NOT NULL;

-- What an unfinished upload has received: blobs that its push session leases, in the order of
-- their first byte.
CREATE TABLE upload_parts (
  push     text COLLATE "C" NOT NULL REFERENCES pushes (id) ON DELETE CASCADE,
  begin_at bigint NOT NULL,
  size     bigint NOT NULL,
  digest   bytea  NOT NULL,
  PRIMARY KEY (push, begin_at)
);
