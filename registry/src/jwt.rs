//! Tokens of issuers that the operator trusts (JSON Web Tokens, RFC 7519): service accounts of
//! Kubernetes, jobs of GitLab or GitHub, users of an identity provider.
//!
//! ```text
//! token ─▶ its issuer, among those of the settings ─▶ its key, among those of the issuer
//!       ─▶ signature, times, audience ─▶ the first rule that its claims fit: scopes and domain
//! ```
//!
//! | module | has |
//! |---|---|
//! | [`settings`] | the file of issuers: whom to trust, and what their tokens permit |
//! | [`keys`] | sets of public keys (JWKS) |
//! | [`token`] | the check of a token |
//! | `crypto` | signatures, by ring |
//! | `source` | keys that are fetched |
//!
//! The library `jsonwebtoken` parses and checks; what is decided here is which key and which
//! algorithm it may use. A token never says so by itself: a key has one algorithm, and a key or a
//! URL in a token is not looked at. Decision 49 says why it is so.

mod crypto;
pub mod keys;
pub mod settings;
mod source;
pub mod token;

use crate::config::Config;
use crate::metrics as names;
use crate::reload::{Reload, Watched};
use keys::KeySet;
use parking_lot::{Mutex, RwLock};
use settings::IssuerSettings;
use source::{Fetcher, Published};
use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub use token::Subject;
use token::{Refusal, Unverified};

/// Bytes of a file at most.
const FILE_BYTES: u64 = 1 << 20;

/// Why the issuers cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssuersError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Keys cannot be fetched from anywhere.
    #[error("cannot set up https for the keys of token issuers: {0}")]
    Client(String),
}

/// Why a token opens nothing.
pub(crate) enum Failure {
    /// It is not valid, or no rule is about it. For the log.
    Refused(String),
    /// The keys of its issuer are not here: that says nothing about it.
    Unavailable(String),
}

/// The issuers of a registry.
pub(crate) struct Issuers {
    path: PathBuf,
    fetcher: Fetcher,
    /// By the name that tokens give.
    current: RwLock<Arc<HashMap<String, Arc<Issuer>>>>,
    watched: Mutex<Watched>,
}

struct Issuer {
    settings: IssuerSettings,
    keys: Keys,
}

enum Keys {
    File(Arc<KeySet>),
    Published(Arc<Published>),
}

impl Issuers {
    /// Those that the settings name; none if they name no file.
    ///
    /// # Errors
    /// [`IssuersError`] says which file, and what is wrong.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, IssuersError> {
        if config.token_issuers.as_os_str().is_empty() {
            return Ok(None);
        }
        let path = config.token_issuers.clone();
        let fetcher = Fetcher::new(config.extra_roots().as_deref());
        let (watched, read) = read(&path, &fetcher, &HashMap::new());
        Ok(Some(Self { path, fetcher, current: RwLock::new(Arc::new(read?)), watched: Mutex::new(watched) }))
    }

    /// The subject of a token, and what it is permitted.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) async fn subject(&self, token: &str) -> Result<Subject, Failure> {
        let refused = |refusal: Refusal| Failure::Refused(refusal.to_string());
        let token = Unverified::parse(token).map_err(refused)?;
        let issuer = self.current.read().get(token.issuer()).cloned();
        let issuer = issuer.ok_or_else(|| refused(Refusal::UnknownIssuer))?;
        let published = match &issuer.keys {
            Keys::File(keys) => return token.verify(&issuer.settings, keys).map_err(refused),
            Keys::Published(published) => published,
        };
        let keys = published.keys().await.map_err(Failure::Unavailable)?;
        match token.verify(&issuer.settings, &keys) {
            // It may be signed by a key that is newer than ours.
            Err(Refusal::UnknownKey) => {
                let keys = published.newer().await.map_err(Failure::Unavailable)?;
                token.verify(&issuer.settings, &keys).map_err(refused)
            }
            verified => verified.map_err(refused),
        }
    }
}

impl Reload for Issuers {
    fn reload(&self, at_once: bool) {
        let mut watched = self.watched.lock();
        if !watched.is_due(at_once) {
            return;
        }
        let before = Arc::clone(&self.current.read());
        let (files, read) = read(&self.path, &self.fetcher, &before);
        *watched = files;
        match read {
            Ok(issuers) => {
                tracing::info!(file = %self.path.display(), issuers = issuers.len(), "token issuers read again");
                *self.current.write() = Arc::new(issuers);
            }
            Err(error) => {
                metrics::counter!(names::RELOAD_ERRORS, "what" => "issuers").increment(1);
                tracing::error!(%error, "the changed token issuers cannot be used; those before stay in force");
            }
        }
    }
}

type Read = Result<HashMap<String, Arc<Issuer>>, IssuersError>;

/// Reads the issuers and their keys, and names the files whose changes matter from now on: if keys
/// cannot be used, theirs too, so that they can be mended.
fn read(path: &Path, fetcher: &Fetcher, before: &HashMap<String, Arc<Issuer>>) -> (Watched, Read) {
    let mut watched = Watched::new(vec![path.into()]);
    let settings = contents(path).and_then(|bytes| {
        let malformed = |reason| IssuersError::Malformed { path: path.into(), reason };
        let text = String::from_utf8(bytes).map_err(|_| malformed("expected text in UTF-8".into()))?;
        settings::parse(&text).map_err(malformed)
    });
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return (watched, Err(error)),
    };
    let files = settings.iter().filter_map(|issuer| issuer.jwks_file.clone());
    watched.add(files);
    let issuers = settings.into_iter().map(|settings| -> Result<_, IssuersError> {
        let keys = match (&settings.jwks_file, &settings.jwks_url) {
            (Some(file), _) => Keys::File(Arc::new(key_file(file)?)),
            (None, url) => {
                let url = url.clone().unwrap_or_default();
                let known = before.values().find_map(|issuer| match &issuer.keys {
                    Keys::Published(published) if published.url() == url => Some(Arc::clone(published)),
                    _ => None,
                });
                Keys::Published(known.map_or_else(|| fetcher.published(url), Ok).map_err(IssuersError::Client)?)
            }
        };
        Ok((settings.issuer.clone(), Arc::new(Issuer { settings, keys })))
    });
    (watched, issuers.collect())
}

fn key_file(path: &Path) -> Result<KeySet, IssuersError> {
    KeySet::parse(&contents(path)?).map_err(|reason| IssuersError::Malformed { path: path.into(), reason })
}

fn contents(path: &Path) -> Result<Vec<u8>, IssuersError> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(FILE_BYTES).read_to_end(&mut bytes));
    read.map_err(|source| IssuersError::Read { path: path.into(), source })?;
    Ok(bytes)
}
