-- Snapshots by what they continue.
CREATE INDEX parents_digest ON parents (digest);

-- Records of the audit log by what lists are filtered by, in the order of lists.
CREATE INDEX audit_log_token ON audit_log (token, number) WHERE token IS NOT NULL;
CREATE INDEX audit_log_repository ON audit_log (repository, number) WHERE repository IS NOT NULL;
