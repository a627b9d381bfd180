//! The access tokens that `pf login` stored: one for each registry, in a file that only its user
//! may read.
//!
//! `pf` and the capture agent read the same file. A token is sent to the registry that it is stored
//! for, and to no other.

use crate::error::{Error, Result};
use pfr_schema::{DomainName, ErrorCode, Reference};
use pfr_service::{Secret, UserDirs, durable};
use reqwest::Url;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file, in the folder `pf` of the user's configuration.
const FILE: &str = "tokens.json";

/// Where tokens are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredTokens {
    file: Option<PathBuf>,
}

impl StoredTokens {
    /// Those of a user. Without a home directory there are none.
    #[must_use]
    pub fn of(dirs: &UserDirs) -> Self {
        Self { file: dirs.config().map(|dir| dir.join("pf").join(FILE)) }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The token for a registry. The token of a server is also for its domains, unless a domain has
    /// one of its own.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn token_for(&self, registry: &str) -> Result<Option<Secret>> {
        let tokens = self.read()?;
        let key = key(registry);
        Ok(tokens.get(&key).or_else(|| tokens.get(server(&key))).map(Secret::new))
    }

    /// Stores the token for a registry in the place of the one before. It is durable when this
    /// returns.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn store(&self, registry: &str, token: &Secret) -> Result<()> {
        let mut tokens = self.read()?;
        tokens.insert(key(registry), token.expose().to_owned());
        self.write(&tokens)
    }

    /// Forgets the token for a registry; returns whether there was one.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn remove(&self, registry: &str) -> Result<bool> {
        let mut tokens = self.read()?;
        let was_there = tokens.remove(&key(registry)).is_some();
        if was_there {
            self.write(&tokens)?;
        }
        Ok(was_there)
    }

    fn read(&self) -> Result<BTreeMap<String, String>> {
        let Some(path) = &self.file else { return Ok(BTreeMap::new()) };
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(source) => return Err(Error::Io { action: "read", path: path.clone(), source }),
        };
        // The parser's words might repeat a token.
        let reason = "it holds the stored tokens, and does not parse; delete it and log in again";
        serde_json::from_slice(&text).map_err(|_| Error::Refused { path: path.clone(), reason: reason.into() })
    }

    fn write(&self, tokens: &BTreeMap<String, String>) -> Result<()> {
        let Some(path) = &self.file else {
            return Err(Error::Refused {
                path: FILE.into(),
                reason: "there is no home directory to store a token in; use PF_TOKEN".into(),
            });
        };
        let fail = |source| Error::Io { action: "write", path: path.clone(), source };
        let mut text = serde_json::to_vec_pretty(tokens).map_err(|error| Error::Internal(error.to_string()))?;
        text.push(b'\n');
        if let Some(folder) = path.parent() {
            durable::create_private_dir_all(folder).map_err(fail)?;
        }
        durable::replace(path, &text).map_err(fail)
    }
}

/// Whether two base URLs name the same server, whatever domain of it they name. A token that was
/// configured for one of them may be sent to the other one.
#[must_use]
pub fn same_server(a: &str, b: &str) -> bool {
    server(&key(a)) == server(&key(b))
}

/// The base URL of the server, whatever domain of it a base URL names.
pub(crate) fn server_of(registry: &str) -> String {
    server(&key(registry)).to_owned()
}

/// The base URL of the registry with this address. Without a scheme, the rules for the host of a
/// reference choose http or https. `None` if it is no address.
#[must_use]
pub fn registry_url(address: &str) -> Option<String> {
    let address = address.trim_end_matches('/');
    if address.contains("://") {
        return Some(address.to_owned());
    }
    let reference: Reference = format!("{address}/x").parse().ok()?;
    // A path that is no domain's would be taken for a part of the repository.
    reference.registry.filter(|_| reference.repository.as_str() == "x")
}

/// Whether two base URLs name the same domain of the same server.
#[must_use]
pub fn same_registry(a: &str, b: &str) -> bool {
    let domain = format!("/{}/{}", DomainName::FOLDER, DomainName::DEFAULT);
    let keys = [a, b].map(key);
    let [a, b] = keys.each_ref().map(|key| key.strip_suffix(domain.as_str()).unwrap_or(key));
    a == b
}

/// What the server said to a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenCheck {
    /// It is valid.
    Valid,
    /// It is unknown, has expired or was revoked.
    Refused,
    /// It is valid, and not for this domain; in the words of the server, which may say for which.
    OtherDomain(String),
}

impl TokenCheck {
    /// What an answer to any request says about the token of the request.
    ///
    /// # Errors
    /// Those that say nothing about it.
    pub(crate) fn of<T>(answer: Result<T>) -> Result<Self> {
        match answer {
            Ok(_) => Ok(Self::Valid),
            Err(error) => match error.code() {
                ErrorCode::Unauthorized => Ok(Self::Refused),
                // It permits something, but not to list repositories.
                ErrorCode::Denied => Ok(Self::Valid),
                ErrorCode::DomainUnknown => Ok(Self::OtherDomain(error.to_string())),
                _ => Err(error),
            },
        }
    }
}

/// A base URL in one form: host in lower case, no port that is the scheme's own, no slash at the
/// end.
fn key(registry: &str) -> String {
    let url = registry.parse::<Url>().map_or_else(|_| registry.to_owned(), |url| url.to_string());
    url.trim_end_matches('/').to_owned()
}

/// The same without the base path of a domain.
fn server(key: &str) -> &str {
    let domain = key.rsplit_once('/').filter(|(_, name)| name.parse::<DomainName>().is_ok());
    domain.and_then(|(rest, _)| rest.strip_suffix(DomainName::FOLDER)?.strip_suffix('/')).unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn stored() -> (tempfile::TempDir, StoredTokens) {
        let dir = tempfile::tempdir().unwrap();
        let dirs = UserDirs { config_home: Some(dir.path().join("config")), ..UserDirs::default() };
        (dir, StoredTokens::of(&dirs))
    }

    fn expose(token: Option<Secret>) -> Option<String> {
        token.map(|token| token.expose().to_owned())
    }

    #[test]
    fn a_token_is_for_its_registry_and_the_domains_of_it() {
        let (_dir, tokens) = stored();
        assert_eq!(tokens.token_for("https://h").unwrap(), None);
        tokens.store("https://H:443/", &Secret::new("one")).unwrap();
        tokens.store("https://h/domains/acme", &Secret::new("acme")).unwrap();
        for (registry, expected) in [
            ("https://h", Some("one")),
            ("https://h/", Some("one")),
            ("https://h/domains/acme", Some("acme")),
            ("https://h/domains/other/", Some("one")),
            ("http://h", None),
            ("https://h:444", None),
            ("https://h.example", None),
            ("https://h/prefix", None),
            ("https://g/domains/acme", None),
        ] {
            assert_eq!(expose(tokens.token_for(registry).unwrap()).as_deref(), expected, "{registry}");
        }
        assert!(tokens.remove("https://h").unwrap() && !tokens.remove("https://h").unwrap());
        assert_eq!(tokens.token_for("https://h/domains/other").unwrap(), None);
        assert_eq!(expose(tokens.token_for("https://h/domains/acme").unwrap()).as_deref(), Some("acme"));
    }

    #[test]
    fn only_the_user_may_read_the_file() {
        let (_dir, tokens) = stored();
        tokens.store("https://h", &Secret::new("hush")).unwrap();
        let file = tokens.file().unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644)).unwrap();
        tokens.store("https://g", &Secret::new("hush")).unwrap();
        assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(file.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_damaged_file_is_refused_without_repeating_it() {
        let (_dir, tokens) = stored();
        tokens.store("https://h", &Secret::new("x")).unwrap();
        for damaged in ["{\"https://h\": \"hush\"", "[\"hush\"]", "{\"https://h\": [\"hush\"]}", "hush"] {
            std::fs::write(tokens.file().unwrap(), damaged).unwrap();
            let error = tokens.token_for("https://h").unwrap_err().to_string();
            assert!(error.contains("log in again") && !error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_registry_is_one_domain_of_a_server() {
        for (a, b) in
            [("https://h/", "https://H:443"), ("http://h/domains/a", "http://h:80/domains/a/"), ("http://h", "http://h/domains/default")]
        {
            assert!(same_registry(a, b), "{a} {b}");
        }
        for (a, b) in
            [("https://h", "http://h"), ("https://h", "https://h/domains/a"), ("https://h:1", "https://h:2"), ("https://h", "https://i")]
        {
            assert!(!same_registry(a, b), "{a} {b}");
        }
    }

    #[test]
    fn a_server_is_the_same_whatever_its_domain() {
        assert_eq!(["http://h/p/domains/a", "https://h:1/"].map(server_of), ["http://h/p", "https://h:1"]);
        assert!(same_server("https://h/domains/a", "https://H/") && same_server("http://h:80", "http://h/domains/b"));
        assert!(
            !same_server("https://h", "http://h") && !same_server("https://h", "https://h/x") && !same_server("https://h", "https://h2")
        );
    }
}
