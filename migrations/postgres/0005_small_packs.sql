-- Live packs by size: merging looks at the small ones, and never at the others.
CREATE INDEX packs_size ON packs (frame_bytes, id) WHERE state = 'live';
