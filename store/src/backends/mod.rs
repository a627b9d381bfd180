//! The databases that keep the metadata: connections, transactions, statements, dialect. What a
//! transaction decides is in `metadata/`.

#[cfg(feature = "postgres")]
mod postgres;
mod sqlite;

#[cfg(feature = "postgres")]
pub use postgres::{PostgresMetadata, PostgresOptions};
pub use sqlite::SqliteMetadata;
