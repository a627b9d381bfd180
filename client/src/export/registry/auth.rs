//! Credentials, and tokens that a registry's token service gives for them.

use crate::error::{Error, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pfr_service::Secret;
use reqwest::Url;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;

/// Bytes of Docker's configuration at most.
const BYTES: u64 = 1 << 20;
/// The name under which Docker stores the credentials of its own registry.
const DOCKER: (&str, &str) = ("docker.io", "https://index.docker.io/v1/");

/// A user name and a password.
#[derive(Clone, Debug)]
pub struct Login {
    /// The user name.
    pub user: String,
    /// The password, or a token that stands for one.
    pub password: Secret,
}

/// The parts of Docker's configuration that matter here.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Docker {
    #[serde(default)]
    auths: HashMap<String, Stored>,
    #[serde(default)]
    creds_store: Option<String>,
    #[serde(default)]
    cred_helpers: HashMap<String, String>,
}

#[derive(Default, Deserialize)]
struct Stored {
    #[serde(default)]
    auth: Option<Secret>,
}

impl Login {
    /// The credentials that `docker login` stored for a host in a configuration file; none without
    /// a file, and none that a helper program keeps.
    ///
    /// # Errors
    /// The file cannot be read. No error shows its content.
    pub fn of_docker(file: &Path, host: &str) -> Result<Option<Self>> {
        use std::io::Read as _;
        let refused = |reason: &str| Error::Refused { path: file.to_owned(), reason: reason.to_owned() };
        let mut bytes = Vec::new();
        match std::fs::File::open(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.and_then(|opened| opened.take(BYTES + 1).read_to_end(&mut bytes)).map_err(Error::io("read", file))?,
        };
        if bytes.len() as u64 > BYTES {
            return Err(refused("it is too long for a configuration of docker"));
        }
        let docker: Docker = serde_json::from_slice(&bytes).map_err(|_| refused("it is no configuration of docker"))?;
        let names = [host.to_owned(), format!("https://{host}"), format!("https://{host}/"), format!("https://{host}/v1/")];
        let stored = names.iter().find_map(|name| docker.auths.get(name));
        let stored = stored.or_else(|| docker.auths.get(DOCKER.1).filter(|_| host == DOCKER.0));
        if let Some(auth) = stored.and_then(|stored| stored.auth.as_ref()).filter(|auth| !auth.is_empty()) {
            let decoded = STANDARD.decode(auth.expose()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let pair = decoded.as_deref().and_then(|text| text.trim_end_matches('\0').split_once(':'));
            let (user, password) = pair.ok_or_else(|| refused(&format!("its credentials for {host} are malformed; log in again")))?;
            return Ok(Some(Self { user: user.to_owned(), password: Secret::new(password) }));
        }
        if let Some(helper) = docker.cred_helpers.get(host).or(docker.creds_store.as_ref().filter(|_| stored.is_some())) {
            tracing::warn!(helper, host, "credentials that a helper program of docker keeps are not read");
        }
        Ok(None)
    }
}

/// The kind of credentials that a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User name and password.
    Basic,
    /// A token of its token service.
    Bearer {
        /// The token service.
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Parses a header `WWW-Authenticate`; none if it asks for something else.
    pub fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        let mut rest = rest.trim_start();
        while let Some((name, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(',').unwrap_or((after, "")),
            };
            let name = name.trim();
            for (known, place) in [("realm", &mut realm), ("service", &mut service), ("scope", &mut scope)] {
                if name.eq_ignore_ascii_case(known) {
                    *place = Some(value.trim().to_owned());
                }
            }
            rest = after.trim_start_matches([',', ' ']);
        }
        Some(Self::Bearer { realm: realm?, service, scope })
    }

    /// The URL of the token service for these actions; none for [`Self::Basic`].
    ///
    /// Credentials are sent there, so it is `https`, or on this machine if the registry is too.
    pub fn token_url(&self, base: &Url, scope: &str) -> Option<Url> {
        let Self::Bearer { realm, service, scope: asked } = self else { return None };
        let mut url: Url = realm.parse().ok()?;
        let is_safe = url.scheme() == "https" || (url.scheme() == "http" && base.scheme() == "http" && crate::remote::is_loopback(&url));
        if !is_safe || !url.username().is_empty() || url.password().is_some() {
            return None;
        }
        let mut pairs = url.query_pairs_mut();
        if let Some(service) = service {
            pairs.append_pair("service", service);
        }
        // The wider one: a token that only reads would be refused at the first upload.
        let scope = if asked.as_deref().is_some_and(|asked| asked.contains("push")) { asked.as_deref().unwrap_or(scope) } else { scope };
        pairs.append_pair("scope", scope);
        drop(pairs);
        Some(url)
    }
}

/// The answer of a token service.
#[derive(Deserialize)]
pub(super) struct TokenAnswer {
    #[serde(default)]
    token: Option<Secret>,
    #[serde(default)]
    access_token: Option<Secret>,
}

impl TokenAnswer {
    /// The token.
    pub fn token(self) -> Option<Secret> {
        self.token.or(self.access_token).filter(|token| !token.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_and_malformed_ones_ask_for_nothing() {
        let bearer =
            Challenge::parse(r#"Bearer realm="https://auth.example/token",service="r.example",scope="repository:a/b:pull,push""#).unwrap();
        let base: Url = "https://r.example/".parse().unwrap();
        let url = bearer.token_url(&base, "repository:a/b:pull").unwrap();
        assert_eq!(url.as_str(), "https://auth.example/token?service=r.example&scope=repository%3Aa%2Fb%3Apull%2Cpush");
        assert_eq!(Challenge::parse("basic realm=x"), Some(Challenge::Basic));
        for text in ["", "Bearer", "Bearer service=\"x\"", "Digest realm=\"x\"", "Bearer realm=\"x"] {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
    }

    #[test]
    fn credentials_are_not_sent_to_a_token_service_that_others_can_read() {
        let (there, here): (Url, Url) = ("https://r.example/".parse().unwrap(), "http://127.0.0.1:5000/".parse().unwrap());
        let at = |realm: &str, base: &Url| Challenge::parse(&format!("Bearer realm=\"{realm}\"")).unwrap().token_url(base, "s").is_some();
        assert!(at("https://auth.example/token", &there) && at("http://127.0.0.1:9/token", &here));
        for realm in ["http://auth.example/token", "http://127.0.0.1:9/token", "ftp://x", "no url", "https://u:p@auth.example/"] {
            assert!(!at(realm, &there), "{realm}");
        }
        assert!(!at("http://auth.example/token", &here));
    }

    #[test]
    fn credentials_of_docker_are_found_by_host_and_never_shown() {
        let dir = std::env::temp_dir().join(format!("pf-docker-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir(&dir).unwrap();
        let file = dir.join("config.json");
        assert!(Login::of_docker(&file, "ghcr.io").unwrap().is_none());
        let auth = STANDARD.encode("me:hu:sh");
        std::fs::write(
            &file,
            format!(r#"{{"auths":{{"ghcr.io":{{"auth":"{auth}"}},"bad":{{"auth":"%"}},"kept":{{}}}},"credsStore":"x"}}"#),
        )
        .unwrap();
        let login = Login::of_docker(&file, "ghcr.io").unwrap().unwrap();
        assert_eq!((login.user.as_str(), login.password.expose()), ("me", "hu:sh"));
        assert!(!format!("{login:?}").contains("hu:sh"));
        for host in ["other.io", "kept"] {
            assert!(Login::of_docker(&file, host).unwrap().is_none(), "{host}");
        }
        assert!(Login::of_docker(&file, "bad").is_err());
        std::fs::write(&file, "hush").unwrap();
        assert!(!Login::of_docker(&file, "ghcr.io").unwrap_err().to_string().contains("hush"));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
