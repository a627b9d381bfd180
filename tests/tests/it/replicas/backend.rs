//! Metadata and storage of the registries under test.

use pfr_testkit::{postgres, s3};
use pfr_tests::{Registry, files};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Where metadata are.
#[derive(Clone, Copy, Debug)]
pub enum Database {
    Sqlite,
    Postgres,
}

/// Where packs are.
#[derive(Clone, Copy, Debug)]
pub enum Packs {
    Directory,
    Bucket,
}

/// One place for metadata and packs, and the registries that share it.
pub struct Backend {
    options: Vec<String>,
    environment: Vec<(String, String)>,
    data: bool,
    packs: Packs,
    directory: TempDir,
    _s3: s3::Server,
}

impl Backend {
    pub fn new(database: Database, packs: Packs) -> Self {
        let (directory, s3) = (TempDir::new().unwrap(), s3::Server::shared());
        let mut options = Vec::new();
        let data = match database {
            Database::Sqlite => true,
            Database::Postgres => {
                options.extend(["--database".to_owned(), postgres::database()]);
                false
            }
        };
        let storage = match packs {
            Packs::Directory => format!("file://{}", directory.path().join("packs").display()),
            Packs::Bucket => format!("s3://{}/a/prefix", s3.bucket()),
        };
        options.extend(["--storage".to_owned(), storage]);
        Self { options, environment: s3.env(), data, packs, directory, _s3: s3 }
    }

    /// Files below a folder of the packs, where these are files.
    pub fn below(&self, folder: &str) -> Vec<PathBuf> {
        match self.packs {
            Packs::Directory => files(&self.directory.path().join("packs").join(folder)).into_iter().map(|(name, _)| name).collect(),
            Packs::Bucket => Vec::new(),
        }
    }

    /// Whether there are tables of a domain, for a registry with this data directory.
    pub fn has_tables(&self, data: &Path, domain: &str) -> bool {
        match self.options.iter().position(|option| option == "--database") {
            None => data.join("domains").join(domain).exists(),
            Some(at) => {
                let count = format!("SELECT count(*) FROM pg_namespace WHERE nspname = 'pf_{domain}'");
                postgres::sql(&self.options[at + 1], &count).trim() != "0"
            }
        }
    }

    /// A registry over it.
    pub fn registry(&self, more: &[&str]) -> Registry {
        let options: Vec<&str> = self.options.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Registry::start_with(self.data, &options, &self.environment)
    }
}

/// Asserts that two snapshot directories are equal, byte for byte.
pub fn assert_same(found: &Path, expected: &Path) {
    let (found, expected) = (files(found), files(expected));
    let names = |files: &[(std::path::PathBuf, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        assert!(found == expected, "{} differs", name.display());
    }
}
