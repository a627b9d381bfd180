//! The place of a layout: a directory, a tar file, a bucket or a registry.

use super::bucket::Bucket;
use super::folder::Folder;
use super::layout::{Layout, failed};
use super::registry::{Address, Login, Registry};
use super::tar::Tar;
use crate::error::{Error, Result, blocking};
use crate::remote::RemoteOptions;
use pfr_schema::ErrorCode;
use pfr_service::Secret;
use reqwest::Url;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The beginnings of the URLs of buckets.
const BUCKETS: [&str; 3] = ["s3://", "gs://", "az://"];
/// The beginning of the URL of a directory or a tar file.
const FILE: &str = "file://";

/// The place of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory.
    Folder(PathBuf),
    /// A tar file: a path that ends in `.tar`.
    Tar(PathBuf),
    /// A prefix of a bucket: `s3://BUCKET/PREFIX`, `gs://…`, `az://…`.
    Bucket(String),
    /// A repository of a registry: `oci://HOST/REPOSITORY[:TAG|@DIGEST]`.
    Registry(Address),
}

/// How places beyond this machine are reached.
#[derive(Clone, Debug, Default)]
pub struct PlaceOptions {
    /// Timeouts, retries and authorities. The token is never sent to a place.
    pub remote: RemoteOptions,
    /// Credentials for the registry of the place; they win over those that docker stored.
    pub login: Option<(String, Secret)>,
    /// Docker's configuration file, if there may be one.
    pub docker: Option<PathBuf>,
}

impl Place {
    /// Whether a text can only be a place, and no reference to a snapshot.
    #[must_use]
    pub fn is_address(text: &str) -> bool {
        text.starts_with(super::registry::SCHEME) || text.starts_with(FILE) || BUCKETS.iter().any(|scheme| text.starts_with(scheme))
    }

    /// Parses a place: an address, or a path.
    ///
    /// # Errors
    /// An address of no known kind; no error shows a password.
    pub fn parse(text: &str) -> Result<Self> {
        if text.starts_with(super::registry::SCHEME) {
            return Ok(Self::Registry(Address::parse(text)?));
        }
        if BUCKETS.iter().any(|scheme| text.starts_with(scheme)) {
            return Ok(Self::Bucket(text.trim_end_matches('/').to_owned()));
        }
        let path = if text.starts_with(FILE) {
            let path = text.parse::<Url>().ok().and_then(|url| url.to_file_path().ok());
            path.ok_or_else(|| failed("this file URL", ErrorCode::InvalidRequest, "expected file:///DIR, with an absolute path"))?
        } else if let Some((scheme, _)) = text.split_once("://") {
            let reason = "expected a directory, a file that ends in .tar, oci://HOST/REPOSITORY[:TAG], s3://BUCKET/PREFIX or file:///DIR";
            let scheme: String = scheme.chars().take(20).collect();
            return Err(failed(&format!("{scheme}://…"), ErrorCode::InvalidRequest, reason));
        } else {
            PathBuf::from(text)
        };
        let is_tar = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("tar")) && !path.is_dir();
        Ok(if is_tar { Self::Tar(path) } else { Self::Folder(path) })
    }

    /// To read from.
    pub(super) async fn open(&self, options: &PlaceOptions) -> Result<Arc<dyn Layout>> {
        let layout: Arc<dyn Layout> = match self {
            Self::Folder(path) => Arc::new(Folder::open(path.clone()).await?),
            Self::Tar(path) => Arc::new(Tar::open(path.clone()).await?),
            Self::Bucket(url) => Arc::new(Bucket::at(url).await?.opened().await?),
            Self::Registry(address) => Arc::new(registry(address, options, false).await?),
        };
        Ok(layout)
    }

    /// To write into.
    pub(super) async fn create(&self, options: &PlaceOptions) -> Result<Arc<dyn Layout>> {
        let layout: Arc<dyn Layout> = match self {
            Self::Folder(path) => Arc::new(Folder::create(path.clone()).await?),
            Self::Tar(path) => Arc::new(Tar::create(path.clone()).await?),
            Self::Bucket(url) => Arc::new(Bucket::at(url).await?.created().await?),
            Self::Registry(address) => Arc::new(registry(address, options, true).await?),
        };
        Ok(layout)
    }
}

async fn registry(address: &Address, options: &PlaceOptions, writes: bool) -> Result<Registry> {
    let login = match (&options.login, &options.docker) {
        (Some((user, password)), _) => Some(Login { user: user.clone(), password: password.clone() }),
        (None, Some(file)) => {
            let (file, host) = (file.clone(), address.host.clone());
            blocking(move || Login::of_docker(&file, &host)).await?
        }
        (None, None) => None,
    };
    Registry::at(address.clone(), writes, &options.remote, login)
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) | Self::Tar(path) => path.display().fmt(f),
            Self::Bucket(url) => f.write_str(url),
            Self::Registry(address) => address.fmt(f),
        }
    }
}

impl std::str::FromStr for Place {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_an_address_or_a_path() {
        for (text, place) in [
            ("./backup", Place::Folder("./backup".into())),
            ("backup", Place::Folder("backup".into())),
            ("a/b.tar", Place::Tar("a/b.tar".into())),
            ("file:///srv/a%20b", Place::Folder("/srv/a b".into())),
            ("file:///srv/b.tar", Place::Tar("/srv/b.tar".into())),
            ("s3://bucket/p/", Place::Bucket("s3://bucket/p".into())),
        ] {
            assert_eq!(Place::parse(text).unwrap(), place);
            assert_eq!(Place::is_address(text), text.contains("://"));
        }
        assert!(matches!(Place::parse("oci://h/a:b").unwrap(), Place::Registry(_)));
        for text in ["http://h/a", "docker://h/a", "oci://h", "file://host/x"] {
            let error = Place::parse(text).unwrap_err();
            assert_eq!(error.code().exit_code(), 1, "{text}: {error}");
        }
    }
}
