//! The databases that keep the metadata: connections, transactions, statements, dialect. The
//! decisions of transactions are in `metadata/`.

/// The migrations of a database in order, each with the name of its file: the only list of them.
macro_rules! migrations {
    ($database:literal) => {
        migrations!($database: "0001_init", "0002_session_leases", "0003_prefixes", "0004_domains", "0005_small_packs", "0006_waypoints",
            "0007_access_tokens", "0008_audit_quota", "0009_oci", "0010_retention", "0011_signing", "0012_domain_keys", "0013_events",
            "0014_lists", "0015_older_replicas", "0016_snapshot_agents", "0017_agents", "0018_marker")
    };
    ($database:literal: $($name:literal),+) => {
        [$(($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations/", $database, "/", $name, ".sql")))),+]
    };
}

#[cfg(feature = "postgres")]
mod postgres;
mod sqlite;

#[cfg(feature = "postgres")]
pub use postgres::{PostgresMetadata, PostgresOptions};
pub use sqlite::SqliteMetadata;

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn every_migration_in_the_folders_is_listed_with_its_number() {
        for (database, listed) in [("postgres", migrations!("postgres")), ("sqlite", migrations!("sqlite"))] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrations").join(database);
            let entries = std::fs::read_dir(&folder).expect("the folder of the migrations");
            let mut files: Vec<String> = entries.map(|entry| entry.expect("a file").file_name().to_string_lossy().into_owned()).collect();
            files.sort();
            let listed: Vec<String> = listed.iter().map(|(name, _)| format!("{name}.sql")).collect();
            assert_eq!(listed, files, "the list `migrations!` above, and the files in {}", folder.display());
            for (at, name) in listed.iter().enumerate() {
                assert!(name.starts_with(&format!("{:04}_", at + 1)), "{name} is migration {}", at + 1);
            }
        }
    }

    /// Operators read there whether replicas of two versions may run side by side.
    #[test]
    fn the_changelog_says_of_each_migration_whether_it_is_additive() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../CHANGELOG.md");
        let text = std::fs::read_to_string(path).expect("the changelog");
        let (_, rest) = text.split_once("\n### Migrations\n").expect("a section on migrations");
        let notes = rest.split("\n### ").next().unwrap_or_default();
        let rows = notes.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
        let rows: Vec<Vec<&str>> = rows.skip(1).map(|row| row.split(" | ").collect()).collect();
        let found: Vec<&str> = rows.iter().map(|row| row[0]).collect();
        let expected: Vec<String> = (1..=migrations!("sqlite").len()).map(|number| number.to_string()).collect();
        assert_eq!(found, expected, "the numbers of the rows");
        for row in &rows {
            assert!(row.len() == 3 && ["yes", "no"].contains(&row[2]), "additive is yes or no: {row:?}");
        }
    }
}
