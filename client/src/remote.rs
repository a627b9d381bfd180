//! The registry's `/v1` as methods, with retries.
//!
//! Everything here may be sent twice, so everything is retried: reading changes nothing; a second
//! session merely expires unused; frames are content-addressed and a second copy is dropped; ending
//! a session twice is no error. A commit is known by its session and every other change of names by
//! a key that is the same in all tries: the registry makes the change once and answers each try
//! alike.
//!
//! `send` has the retries, `frames` the streams, `direct` the way around the registry to the
//! storage behind it, `trust` the certificates that are accepted, `traced` the spans of requests.

mod agents;
pub(crate) mod backoff;
mod direct;
mod events;
mod frames;
mod gc;
mod integrity;
mod names;
pub(crate) mod pace;
mod pages;
mod pushes;
mod read;
mod send;
mod signing;
pub(crate) mod traced;
mod trust;

pub use events::{EventFilter, Events, Followed};
pub use frames::BoxFrames;
pub use pages::{Entry, PageOf, all_pages};
pub use pushes::{FrameSource, Missing};
pub use send::reason;
pub use trust::{Distrust, extra_roots};

use crate::error::{Error, Result};
use crate::tokens::server_of;
use futures::future::BoxFuture;
use pfr_schema::RepositoryName;
use pfr_schema::signature::PublicKey;
use pfr_service::{Secret, Shared};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Certificate, Client, Url};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use url::Host;

/// Header with the ids of the registries that passed a request on, comma-separated, in order. A
/// registry that finds its own id here must not pass the request on.
pub const VIA: &str = "pf-via";

/// A request that failed and is about to be tried again.
#[derive(Clone, Debug)]
pub struct Retrying {
    /// How often it has failed.
    pub attempt: u32,
    /// Whether the registry answered, and said that it cannot serve the request now.
    pub answered: bool,
    /// How long the registry asks this caller to wait, if it sends more requests than it may.
    pub asked: Option<Duration>,
    /// What happened.
    pub error: String,
}

/// Called before a request is tried again, and with `None` when the registry answers again. It is
/// called from any task and must not block.
#[derive(Clone)]
pub struct OnRetry(Arc<Listener>);

type Listener = dyn Fn(Option<&Retrying>) + Send + Sync;

impl OnRetry {
    /// Calls `tell`.
    pub fn new(tell: impl Fn(Option<&Retrying>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    fn tell(&self, retrying: Option<&Retrying>) {
        (self.0)(retrying);
    }
}

impl fmt::Debug for OnRetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnRetry")
    }
}

/// Holds received bytes back, so that a transfer takes no more bandwidth than it may. It is asked
/// before each piece of frames is handed on, with the bytes of the piece. While a piece waits, no
/// more of its stream is read.
#[derive(Clone)]
pub struct Brake(Arc<Hold>);

type Hold = dyn Fn(u64) -> BoxFuture<'static, ()> + Send + Sync;

impl Brake {
    /// Waits as long as `hold` does.
    pub fn new(hold: impl Fn(u64) -> BoxFuture<'static, ()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hold))
    }

    /// Waits until a piece of so many bytes may pass.
    #[must_use]
    pub fn hold(&self, bytes: u64) -> BoxFuture<'static, ()> {
        (self.0)(bytes)
    }
}

impl fmt::Debug for Brake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Brake")
    }
}

/// The state of the connection to the registry.
#[derive(Debug, Default)]
struct Connection {
    /// Whether the registry has ever answered.
    answered: AtomicBool,
    /// Failures in a row of the request that has failed most often.
    failures: AtomicU32,
}

/// Settings of a [`Remote`].
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Access token.
    pub token: Option<Secret>,
    /// Whether the token may be sent over plain http beyond loopback, where any machine on the way
    /// can read it. Default false: [`Remote::new`] then refuses.
    pub token_over_http: bool,
    /// File with certificates (PEM) of authorities that are trusted besides those that this machine
    /// trusts. Default: none.
    pub extra_roots: Option<PathBuf>,
    /// How often a request is tried again before giving up. Default 5.
    pub retries: u32,
    /// How long requests are retried if the registry has been reached: it has answered before, or
    /// taken a request. A restart takes its time. With zero only `retries` counts. Default 2
    /// minutes.
    pub retry_for: Duration,
    /// Whether `retry_for` counts although the registry has not been reached yet. Default false:
    /// its address may be wrong.
    pub retry_from_start: bool,
    /// Longest wait between two tries; a registry that asks for more is not asked again. Default 30
    /// s.
    pub longest_wait: Duration,
    /// Limit on making a connection. Default 10 s.
    pub connect_timeout: Duration,
    /// A request in which no byte has moved for this long is given up. Default 120 s.
    pub idle_timeout: Duration,
    /// Bytes a second that must move on average while `idle_timeout` is waited. Default 4 KiB.
    pub min_rate: u64,
    /// Limit on receiving an answer that is a document, once it has begun. Default 10 minutes.
    pub answer_timeout: Duration,
    /// Called on retries.
    pub on_retry: Option<OnRetry>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            token: None,
            token_over_http: false,
            extra_roots: None,
            retries: 5,
            retry_for: Duration::from_secs(120),
            retry_from_start: false,
            longest_wait: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(120),
            min_rate: 4 << 10,
            answer_timeout: Duration::from_secs(600),
            on_retry: None,
        }
    }
}

/// A registry. Cheap to clone; clones share connections and counters.
#[derive(Clone)]
pub struct Remote {
    client: Shared<Client>,
    base: Arc<Url>,
    options: Shared<RemoteOptions>,
    round_trips: Arc<AtomicU64>,
    connection: Arc<Connection>,
    direct: Shared<direct::Direct>,
    via: Option<Arc<str>>,
    /// Keys of which one must have signed what is pulled; none: nothing need be signed.
    verify_keys: Option<Arc<[PublicKey]>>,
    brake: Option<Brake>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({})", self.url())
    }
}

impl Remote {
    /// A registry at `base_url`, `http(s)://host[:port][/prefix]`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Url`], [`Error::TokenOverHttp`]; [`Error::Io`] and [`Error::Refused`] for the file
    /// of authorities.
    pub fn new(base_url: &str, options: RemoteOptions) -> Result<Self> {
        let fail = |reason: &str| Error::Url { url: shown(base_url), reason: reason.to_owned() };
        let base: Url = base_url.parse().map_err(|_| fail("expected http://host[:port] or https://host[:port]"))?;
        if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
            return Err(fail("expected http://host[:port] or https://host[:port]"));
        }
        if !base.username().is_empty() || base.password().is_some() || base.query().is_some() || base.fragment().is_some() {
            return Err(fail("expected no user, query or fragment; a token is given by itself"));
        }
        // Each client adds the path of its API. A domain may have such a name.
        let server = server_of(base_url);
        let path = server.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
        let last = path.and_then(|(_, path)| path.rsplit('/').next());
        if let Some(last) = last.filter(|last| ["v1", "v2", "ui"].contains(last)) {
            return Err(fail(&format!("write the address of the server, without /{last} at its end")));
        }
        let mut headers = HeaderMap::new();
        if let Some(token) = &options.token {
            if base.scheme() == "http" && !options.token_over_http && !is_loopback(&base) {
                return Err(Error::TokenOverHttp { url: shown(base_url) });
            }
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose()))
                .map_err(|_| fail("the token has characters that no header can carry"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let roots = trust::extra_roots(options.extra_roots.as_deref())?;
        let client = new_client(&options, headers, &roots, base.scheme() == "https").map_err(|error| match &options.extra_roots {
            Some(path) => Error::Refused { path: path.clone(), reason: format!("its certificates cannot be used: {}", reason(&error)) },
            None => fail(&format!(
                "TLS cannot be set up: {}; where no authority is trusted, the setting tls-ca names a file with some",
                reason(&error)
            )),
        })?;
        let direct = Shared::new(direct::Direct::new(roots));
        Ok(Self {
            client: Shared::new(client),
            base: Arc::new(base),
            options: Shared::new(options),
            round_trips: Arc::default(),
            connection: Arc::default(),
            direct,
            via: None,
            verify_keys: None,
            brake: None,
        })
    }

    /// The same registry. Each request tells it the ids of the registries that passed it on, as in
    /// [`VIA`].
    #[must_use]
    pub fn via(&self, chain: &str) -> Self {
        Self { via: Some(chain.into()), ..self.clone() }
    }

    /// The same registry. A pull from it fetches nothing of a snapshot that none of these keys has
    /// signed.
    #[must_use]
    pub fn verifying(&self, keys: Vec<PublicKey>) -> Self {
        Self { verify_keys: Some(keys.into()), ..self.clone() }
    }

    pub(crate) fn verify_keys(&self) -> Option<&[PublicKey]> {
        self.verify_keys.as_deref()
    }

    /// The same registry, whose frames are held back.
    #[must_use]
    pub fn braked(&self, brake: Brake) -> Self {
        Self { brake: Some(brake), ..self.clone() }
    }

    /// The base URL, without a trailing slash.
    #[must_use]
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Requests sent so far, retries included.
    #[must_use]
    pub fn round_trips(&self) -> u64 {
        self.round_trips.load(Ordering::Relaxed)
    }

    pub(crate) fn options(&self) -> &RemoteOptions {
        &self.options
    }

    /// `/v1/…`; segments are percent-encoded, a repository is one segment.
    fn path(&self, segments: &[&str]) -> Url {
        let mut url = (*self.base).clone();
        // The scheme was checked to be one that has a path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().push("v1").extend(segments);
        }
        url
    }

    fn repository_path(&self, repository: &RepositoryName, segments: &[&str]) -> Url {
        let mut all = vec!["repositories", repository.as_str()];
        all.extend(segments);
        self.path(&all)
    }
}

/// A client for requests with these headers. Only one that `speaks_tls` reads the authorities that
/// this machine trusts: there are hundreds of them, and to read them takes longer than a request.
fn new_client(options: &RemoteOptions, headers: HeaderMap, roots: &[Certificate], speaks_tls: bool) -> reqwest::Result<Client> {
    let builder = Client::builder()
        .default_headers(headers)
        .user_agent(concat!("pf/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        // The registry closes idle connections after a minute; one that it is closing must not be
        // picked for a request.
        .pool_idle_timeout(Duration::from_secs(30))
        // Registries are in the same network, and loopback must never go through a proxy.
        .no_proxy()
        .tcp_nodelay(true);
    let builder = if speaks_tls { builder.tls_certs_merge(roots.iter().cloned()) } else { builder.tls_certs_only([]) };
    builder.build()
}

/// Whether only this machine can see what is sent there. A name other than `localhost` may be any
/// machine.
pub(crate) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// The parts of a URL that an error may show: scheme, host and port. The rest may hold a password
/// or a token.
fn shown(text: &str) -> String {
    if let Ok(url) = text.parse::<Url>()
        && let Some(host) = url.host_str()
    {
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        return format!("{}://{host}{port}", url.scheme());
    }
    // The text does not parse as a URL, but it may still hold a user name or a password.
    let rest = text.rsplit_once('@').map_or(text, |(_, rest)| rest);
    rest.split(['?', '#']).next().unwrap_or_default().chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_one_segment() {
        for (base, expected) in [
            ("http://h:1", "http://h:1/v1/repositories/team%2Fagent/tags"),
            ("https://h/prefix/", "https://h/prefix/v1/repositories/team%2Fagent/tags"),
        ] {
            let remote = Remote::new(base, RemoteOptions::default()).unwrap();
            assert_eq!(remote.repository_path(&"team/agent".parse().unwrap(), &["tags"]).as_str(), expected);
        }
    }

    #[test]
    fn only_base_urls_are_accepted() {
        for url in ["", "h:80", "ftp://h", "http://", "http://user:pw@h", "http://h?x=1", "file:///x"] {
            let error = Remote::new(url, RemoteOptions::default()).unwrap_err();
            assert_eq!(error.code().exit_code(), 1, "{url}: {error}");
        }
    }

    #[test]
    fn the_path_of_an_api_is_no_part_of_a_base_url() {
        for (url, path) in [("http://h/v1", "/v1"), ("https://h:1/prefix/v2/", "/v2"), ("http://h/domains/acme/ui", "/ui")] {
            let error = Remote::new(url, RemoteOptions::default()).unwrap_err();
            assert!(error.to_string().ends_with(&format!("without {path} at its end")), "{error}");
            assert_eq!(error.code().exit_code(), 1);
        }
        for url in ["http://h/domains/v1", "http://h/gui", "http://v1"] {
            assert!(Remote::new(url, RemoteOptions::default()).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_refused_url_is_shown_without_its_secrets() {
        for url in [
            "http://user:hush@h:80/x",
            "http://hush@h",
            "ftp://user:hush@h",
            "user:hush@h",
            "http://user:hu@hush@h:port",
            "http://h?token=hush",
            "http://h#hush",
            "h:x/y?token=hush",
        ] {
            let error = Remote::new(url, RemoteOptions::default()).unwrap_err().to_string();
            assert!(!error.contains("hu"), "{error}");
            assert!(error.contains('h'), "{error}");
        }
        assert!(Remote::new("http://user:hush@h:80/x", RemoteOptions::default()).unwrap_err().to_string().contains("\"http://h\""));
    }

    #[test]
    fn a_token_is_not_printed() {
        let options = RemoteOptions { token: Some(Secret::new("hush")), ..RemoteOptions::default() };
        assert!(!format!("{options:?}").contains("hush"));
        assert!(!format!("{:?}", Remote::new("https://h", options).unwrap()).contains("hush"));
    }
}
