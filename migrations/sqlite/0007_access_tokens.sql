-- Access tokens, in the store of the domain `default` beside the catalogue of domains. hash: SHA-256
-- of the token. domain: the only domain that the token is for, NULL for all. scopes: what it
-- permits, separated by spaces. used_at: when it was used, to the minute.
CREATE TABLE access_tokens (
  id         TEXT    PRIMARY KEY,
  hash       BLOB    NOT NULL,
  label      TEXT    NOT NULL,
  domain     TEXT,
  scopes     TEXT    NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER,
  used_at    INTEGER,
  revoked_at INTEGER
) WITHOUT ROWID;
