-- The wrapped keys of encrypted domains, in the store of the domain `default` beside the catalogue of
-- domains. wrapped: a line of JSON; only the key that wrapped it opens it. A domain without a row is
-- not encrypted. When a domain is deleted, its row goes first.
CREATE TABLE domain_keys (
  domain  text COLLATE "C" PRIMARY KEY,
  wrapped text NOT NULL
);
