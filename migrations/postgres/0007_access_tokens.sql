-- Access tokens, in the store of the domain `default` beside the catalogue of domains. hash: SHA-256
-- of the token. domain: the only domain that the token is for, NULL for all. scopes: what it
-- permits, separated by spaces. used_at: when it was used, to the minute.
CREATE TABLE access_tokens (
  id         text COLLATE "C" PRIMARY KEY,
  hash       bytea  NOT NULL,
  label      text   NOT NULL,
  domain     text COLLATE "C",
  scopes     text   NOT NULL,
  created_at bigint NOT NULL,
  expires_at bigint,
  used_at    bigint,
  revoked_at bigint
);
