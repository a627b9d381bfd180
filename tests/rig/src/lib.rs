//! Throw-away servers for tests: real processes, on loopback, torn down with who started them.
