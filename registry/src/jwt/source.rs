//! Keys that an issuer publishes, fetched over https and kept.
//!
//! Requests do not fetch: they use the keys that are here, and one task fetches newer ones. It does
//! so when the keys are five minutes old, and when a token names a key that is not among them, but
//! at most every ten seconds, whatever tokens strangers send. While the issuer cannot be reached,
//! its last keys are believed for a day.

use super::keys::{BYTES, KeySet};
use crate::metrics as names;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Age at which keys are fetched again.
const OLD: Duration = Duration::from_secs(300);
/// Age at which keys are not believed any more.
const TOO_OLD: Duration = Duration::from_secs(24 * 3600);
/// The shortest time between the beginnings of two fetches.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a fetch may take. Less than the pause: there is one at a time.
const FETCH: Duration = Duration::from_secs(8);
/// Requests that wait for a fetch at once. Others are told to try again: an issuer that hangs must
/// not hold all requests of the registry.
const WAITING: usize = 32;

/// Fetches keys.
pub(super) struct Fetcher {
    /// Or why none can be fetched.
    client: Result<reqwest::Client, String>,
    /// The shortest time between the beginnings of two fetches.
    pause: Duration,
}

impl Fetcher {
    /// With the certificates in this file as authorities, too.
    pub(super) fn new(extra_roots: Option<&Path>) -> Self {
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = pfr_client::extra_roots(extra_roots).map_err(|error| error.to_string()).and_then(|roots| {
            let client = reqwest::Client::builder()
                .tls_certs_merge(roots)
                .https_only(true)
                // A redirect could lead to keys of others.
                .redirect(reqwest::redirect::Policy::none())
                .user_agent(concat!("pf-registry/", env!("CARGO_PKG_VERSION")))
                .timeout(FETCH);
            client.build().map_err(|error| pfr_client::reason(&error))
        });
        Self { client, pause: PAUSE }
    }

    /// The keys at this address. Nothing is fetched yet.
    ///
    /// # Errors
    /// Why nothing can be fetched.
    pub(super) fn published(&self, url: String) -> Result<Arc<Published>, String> {
        let (client, begun, pause) = (self.client.clone()?, Mutex::new(None), self.pause);
        let (kept, waiting) = (watch::Sender::new(Kept::default()), Semaphore::new(WAITING));
        Ok(Arc::new(Published { url, client, begun, pause, kept, waiting }))
    }
}

/// The keys of one issuer.
pub(super) struct Published {
    url: String,
    client: reqwest::Client,
    /// When the last fetch began.
    begun: Mutex<Option<Instant>>,
    pause: Duration,
    kept: watch::Sender<Kept>,
    waiting: Semaphore,
}

/// What the fetches brought.
#[derive(Clone, Default)]
struct Kept {
    keys: Option<(Arc<KeySet>, Instant)>,
    is_fetching: bool,
}

impl Kept {
    fn younger_than(&self, age: Duration) -> Option<Arc<KeySet>> {
        self.keys.as_ref().filter(|(_, at)| at.elapsed() < age).map(|(keys, _)| Arc::clone(keys))
    }
}

impl Published {
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// The keys.
    ///
    /// # Errors
    /// Why they are not here.
    pub(super) async fn keys(self: &Arc<Self>) -> Result<Arc<KeySet>, String> {
        let kept = self.kept.borrow().clone();
        if let Some(keys) = kept.younger_than(OLD) {
            return Ok(keys);
        }
        self.fetch();
        match kept.younger_than(TOO_OLD) {
            Some(keys) => Ok(keys),
            None => self.fetched().await,
        }
    }

    /// The keys after a fetch that a token with an unknown key is reason for.
    ///
    /// # Errors
    /// Why they are not here.
    pub(super) async fn newer(self: &Arc<Self>) -> Result<Arc<KeySet>, String> {
        self.fetch();
        self.fetched().await
    }

    /// Begins a fetch, unless one began moments ago. It does not belong to the request: a client
    /// that leaves must not end what others wait for.
    fn fetch(self: &Arc<Self>) {
        let mut begun = self.begun.lock();
        if begun.is_some_and(|begun| begun.elapsed() < self.pause) {
            return;
        }
        *begun = Some(Instant::now());
        self.kept.send_modify(|kept| kept.is_fetching = true);
        let this = Arc::clone(self);
        pfr_service::task::spawn(async move {
            let got = tokio::time::timeout(FETCH, get(&this.client, &this.url)).await;
            let got = got.unwrap_or_else(|_| Err(format!("no answer within {} seconds", FETCH.as_secs())));
            if let Err(reason) = &got {
                metrics::counter!(names::RELOAD_ERRORS, "what" => "keys").increment(1);
                tracing::warn!(reason, url = this.url, "the keys of a token issuer cannot be fetched");
            }
            this.kept.send_modify(|kept| {
                kept.is_fetching = false;
                if let Ok(keys) = got {
                    kept.keys = Some((Arc::new(keys), Instant::now()));
                }
            });
        });
    }

    /// The keys when no fetch is under way any more.
    async fn fetched(&self) -> Result<Arc<KeySet>, String> {
        let _place = self.waiting.try_acquire().map_err(|_| "too many requests wait for them".to_owned())?;
        let mut kept = self.kept.subscribe();
        let kept = kept.wait_for(|kept| !kept.is_fetching).await.map_err(|error| error.to_string())?;
        kept.younger_than(TOO_OLD).ok_or_else(|| format!("{} does not give them", self.url))
    }
}

async fn get(client: &reqwest::Client, url: &str) -> Result<KeySet, String> {
    let failed = |error: reqwest::Error| pfr_client::reason(&error);
    let mut answer = client.get(url).header("accept", "application/json").send().await.map_err(failed)?;
    if answer.status() != reqwest::StatusCode::OK {
        return Err(format!("it answered {}", answer.status()));
    }
    let mut bytes = Vec::new();
    while let Some(piece) = answer.chunk().await.map_err(failed)? {
        if bytes.len() + piece.len() > BYTES {
            return Err(format!("its answer is longer than {BYTES} bytes"));
        }
        bytes.extend_from_slice(&piece);
    }
    KeySet::parse(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_testkit::jwt::{Signer, jwks};
    use pfr_testkit::tls::Authority;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    /// What an issuer answers. Empty: nothing at all.
    type Answer = Arc<Mutex<String>>;

    /// An issuer on loopback, its keys, and how often it was asked.
    async fn issuer(answer: &Answer, pause: Duration) -> (Arc<Published>, Arc<AtomicUsize>) {
        let (authority, dir, asked) = (Authority::new(), tempfile::tempdir().unwrap(), Arc::new(AtomicUsize::new(0)));
        let fetcher = Fetcher { pause, ..Fetcher::new(Some(&authority.write(dir.path().join("ca")))) };
        let pair = authority.certificate(&["127.0.0.1"]);
        let chain = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
        let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let published = fetcher.published(format!("https://{}/", listener.local_addr().unwrap())).unwrap();
        let (answer, counter) = (Arc::clone(answer), Arc::clone(&asked));
        pfr_service::task::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = acceptor.accept(stream).await.unwrap();
                let _ = stream.read(&mut [0; 4096]).await;
                counter.fetch_add(1, Ordering::SeqCst);
                let body = answer.lock().clone();
                if body.is_empty() {
                    std::future::pending::<()>().await;
                }
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = stream.write_all((head + &body).as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        (published, asked)
    }

    #[tokio::test]
    async fn a_new_key_is_fetched_when_a_token_names_it_and_only_after_the_pause() {
        let (old, new) = (Signer::es256("old"), Signer::es256("new"));
        let answer = Answer::new(Mutex::new(jwks(&[&old])));
        let (published, asked) = issuer(&answer, Duration::from_millis(300)).await;
        // Many at once are one fetch.
        let all = futures::future::join_all((0..20).map(|_| published.keys())).await;
        assert!(all.into_iter().all(|keys| keys.is_ok_and(|keys| keys.len() == 1)));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        *answer.lock() = jwks(&[&old, &new]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut questions = 0;
        while published.newer().await.unwrap().len() < 2 {
            assert!(Instant::now() < deadline, "the new key is never fetched");
            questions += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(questions > 0 && asked.load(Ordering::SeqCst) == 2, "{questions} questions, {asked:?} fetches");
    }

    #[tokio::test]
    async fn keys_stay_while_their_issuer_fails_and_a_few_requests_wait_for_one_that_hangs() {
        let answer = Answer::new(Mutex::new(jwks(&[&Signer::eddsa("k")])));
        let (published, asked) = issuer(&answer, Duration::ZERO).await;
        assert_eq!(published.keys().await.unwrap().len(), 1);
        *answer.lock() = "no keys".to_owned();
        assert_eq!(published.newer().await.unwrap().len(), 1);
        assert!(asked.load(Ordering::SeqCst) >= 2);
        // It hangs: requests that know their key go on.
        answer.lock().clear();
        published.fetch();
        let waiting: Vec<_> = (0..WAITING + 8)
            .map(|_| {
                let published = Arc::clone(&published);
                pfr_service::task::spawn(async move { published.fetched().await.map(|keys| keys.len()) })
            })
            .collect();
        assert_eq!(published.keys().await.unwrap().len(), 1);
        let refused = async {
            while waiting.iter().filter(|one| one.is_finished()).count() < 8 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), refused).await.expect("more wait than may");
        waiting.iter().for_each(pfr_service::task::Task::abort);
    }
}
