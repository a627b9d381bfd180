//! Where a registry's store lives.

use pfr_testkit::{postgres, s3};
use pfr_tests::{Registry, files};
use std::path::Path;
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
    _directory: TempDir,
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
        Self { options, environment: s3.env(), data, _directory: directory, _s3: s3 }
    }

    /// A registry over it.
    pub fn registry(&self, more: &[&str]) -> Registry {
        let options: Vec<&str> = self.options.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Registry::start_with(self.data, &options, &self.environment)
    }
}

/// That two snapshot directories are the same, byte for byte.
pub fn assert_same(found: &Path, expected: &Path) {
    let (found, expected) = (files(found), files(expected));
    let names = |files: &[(std::path::PathBuf, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        assert!(found == expected, "{} differs", name.display());
    }
}
