//! TLS: requests as in plain HTTP, certificates that are renewed while requests run, and handshakes
//! that keep nothing from others.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, client, ok, problem};
use pfr_registry::config::{Overrides, SettingsError};
use pfr_registry::{Config, Error, Server, TlsError};
use pfr_schema::{ErrorCode, api};
use pfr_testkit::tls::Authority;
use reqwest::{Client, StatusCode};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Longer than any of this takes, on any machine.
const FOR_EVER: Duration = Duration::from_secs(60);
/// The address of each registry here.
const NAME: &str = "127.0.0.1";

/// A registry with a certificate, the authority of it, and the folder with both files.
async fn start(change: impl FnOnce(&mut Config)) -> (Registry, Authority, TempDir) {
    let (authority, files) = (Authority::new(), tempfile::tempdir().expect("a directory"));
    let (certificate, key) = authority.certificate(&[NAME]).write(files.path());
    let mut registry = Registry::start_with(|config| {
        (config.tls_cert, config.tls_key) = (certificate, key);
        change(config);
    })
    .await;
    registry.client = client(&[&authority]);
    (registry, authority, files)
}

/// A connection with a finished handshake.
async fn connect(address: SocketAddr, authority: &Authority, protocols: &[&[u8]]) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate")).expect("a certificate");
    let mut config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let name = ServerName::try_from(NAME).expect("an address");
    TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
}

/// Sends a request on a connection that stays open.
async fn ask(stream: &mut TlsStream<TcpStream>) -> String {
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("written");
    let mut answer = Vec::new();
    while !answer.ends_with(b"alive\n") {
        assert!(stream.read_buf(&mut answer).await.expect("an answer") > 0, "{}", String::from_utf8_lossy(&answer));
    }
    String::from_utf8(answer).expect("text")
}

#[tokio::test]
async fn snapshots_are_pushed_and_pulled_over_tls() {
    let (registry, authority, _files) = start(|_| {}).await;
    assert!(registry.base.starts_with("https://"));
    let sample = snapshot(0..200, vec![]);
    registry.push(REPO, &sample, Some("t")).await;
    assert_eq!(registry.fetch(REPO, &sample.digests()).await.len(), sample.blobs.len());
    assert_eq!(registry.get("/livez").await.version(), reqwest::Version::HTTP_11);
    let page = registry.get(&format!("/ui/{REPO}/t")).await.text().await.expect("a page");
    assert!(page.contains(&format!("pf pull {}/team/agent:t<", registry.base)), "commands name it as it is asked: {page}");
    // It offers what it speaks, and refuses a client that speaks nothing of it.
    let both = connect(registry.address, &authority, &[b"h2", b"http/1.1"]).await.expect("a handshake");
    assert_eq!(both.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    assert!(connect(registry.address, &authority, &[b"h2"]).await.is_err());
    let mut none = connect(registry.address, &authority, &[]).await.expect("a handshake");
    assert!(ask(&mut none).await.starts_with("HTTP/1.1 200"));
    // The check of line ends sees what is inside TLS.
    none.write_all(b"GET /livez HTTP/1.1\nhost: localhost\r\n\r\n").await.expect("written");
    let mut answer = [0; 12];
    none.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 400");
    let strangers = client(&[&Authority::new()]).get(registry.url("/livez")).send().await;
    assert!(strangers.is_err_and(|error| error.is_connect()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_renewed_under_load_without_a_failed_request() {
    let (registry, first, files) = start(|_| {}).await;
    let second = Authority::new();
    let (done, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut load = JoinSet::new();
    for number in 0..4 {
        // Half of them make a new connection for each request.
        let idle = if number % 2 == 0 { 0 } else { 1 };
        let roots = [&first, &second].map(|authority| reqwest::Certificate::from_pem(authority.pem().as_bytes()).expect("one"));
        let client = Client::builder().no_proxy().tls_certs_only(roots).pool_max_idle_per_host(idle).build().expect("a client");
        let (done, asked, url) = (Arc::clone(&done), Arc::clone(&asked), registry.url("/v1/repositories"));
        load.spawn(async move {
            while !done.load(Ordering::Relaxed) {
                let answer = client.get(&url).send().await.expect("no request fails");
                assert_eq!(answer.status(), StatusCode::OK);
                answer.bytes().await.expect("a whole answer");
                asked.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let reloader = registry.reloader.clone().expect("there is a certificate");
    for round in 0..6 {
        let (new, old) = if round % 2 == 0 { (&second, &first) } else { (&first, &second) };
        new.certificate(&[NAME]).write(files.path());
        reloader.reload();
        until_trusted(&registry, new).await;
        let old = client(&[old]).get(registry.url("/livez")).send().await;
        assert!(old.is_err_and(|error| error.is_connect()), "the old certificate is still shown");
        let before = asked.load(Ordering::Relaxed);
        while asked.load(Ordering::Relaxed) < before + 20 {
            assert!(load.try_join_next().is_none(), "a request failed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    done.store(true, Ordering::Relaxed);
    load.join_all().await;
}

/// Waits until new connections get a certificate of this authority.
async fn until_trusted(registry: &Registry, authority: &Authority) {
    let repeat = async {
        while client(&[authority]).get(registry.url("/livez")).send().await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(FOR_EVER, repeat).await.expect("the new certificate is never shown");
}

#[tokio::test]
async fn a_changed_certificate_is_noticed_without_a_signal() {
    let (registry, _, files) = start(|_| {}).await;
    let second = Authority::new();
    second.certificate(&[NAME]).write(files.path());
    until_trusted(&registry, &second).await;
}

#[tokio::test]
async fn a_broken_new_certificate_leaves_the_old_one_in_force() {
    let (registry, authority, files) = start(|_| {}).await;
    let reloader = registry.reloader.clone().expect("there is a certificate");
    let second = Authority::new();
    let broken: [(&str, String); 3] = [
        ("tls.crt", "no certificate".to_owned()),
        ("tls.crt", second.certificate(&[NAME]).certificate),
        ("tls.key", second.certificate(&[NAME]).key),
    ];
    for (failures, (name, text)) in broken.into_iter().enumerate() {
        std::fs::write(files.path().join(name), text).expect("written");
        reloader.reload();
        // A look at the files may come first.
        let count = |text: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix("pf_reload_errors_total{what=\"certificate\"} "))?;
            line.parse::<f64>().ok()
        };
        let noticed = async {
            while count(&registry.get("/metrics").await.text().await.expect("text")).unwrap_or_default() < failures as f64 + 1.0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(FOR_EVER, noticed).await.expect("the failure is counted");
        let answer = client(&[&authority]).get(registry.url("/livez")).send().await.expect("the old certificate");
        assert_eq!(answer.status(), StatusCode::OK);
    }
    second.certificate(&[NAME]).write(files.path());
    reloader.reload();
    until_trusted(&registry, &second).await;
}

#[tokio::test]
async fn the_end_of_the_certificate_is_a_metric() {
    let (registry, ..) = start(|_| {}).await;
    let text = registry.get("/metrics").await.text().await.expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix("pf_tls_certificate_expiry_timestamp_seconds "));
    assert!(line.and_then(|value| value.parse::<f64>().ok()).is_some_and(|end| end > 60e9), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_handshakes_take_no_connection_from_others() {
    // Fewer connections than handshakes: these do not count among those.
    let (registry, authority, _files) = start(|config| config.max_connections = 4).await;
    let mut honest = connect(registry.address, &authority, &[]).await.expect("a handshake");
    assert!(ask(&mut honest).await.starts_with("HTTP/1.1 200"));
    let mut hung = JoinSet::new();
    let connected = Arc::new(AtomicUsize::new(0));
    for number in 0..500 {
        let (address, connected) = (registry.address, Arc::clone(&connected));
        hung.spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            connected.fetch_add(1, Ordering::Relaxed);
            // Silent, or a byte of a handshake now and then.
            for byte in [22, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(1)) {
                if number % 2 == 0 || stream.write_all(&[byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            // Until the registry ends it.
            let _ = stream.read(&mut [0; 64]).await;
        });
    }
    let all_there = async {
        while connected.load(Ordering::Relaxed) < 500 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(FOR_EVER, all_there).await.expect("they connect");
    for path in ["/livez", "/readyz", "/v1/repositories"] {
        let asked = client(&[&authority]).get(registry.url(path)).send();
        let answer = tokio::time::timeout(FOR_EVER, asked).await.expect("an answer in time").expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
    }
    assert!(ask(&mut honest).await.starts_with("HTTP/1.1 200"), "an idle connection made room for a handshake");
    hung.shutdown().await;
}

#[tokio::test]
async fn a_handshake_that_takes_too_long_is_ended() {
    let (registry, ..) = start(|config| config.tls_handshake_seconds = 1).await;
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    stream.write_all(&[22, 3, 1]).await.expect("written");
    let read = tokio::time::timeout(FOR_EVER, stream.read(&mut [0; 64])).await.expect("it is ended");
    assert!(read.is_err() || read.is_ok_and(|bytes| bytes == 0));
    let text = registry.get("/metrics").await.text().await.expect("text");
    assert!(text.contains("pf_tls_failed_handshakes_total{reason=\"timeout\"}"), "{text}");
}

#[tokio::test]
async fn plain_http_at_the_port_of_https_is_told_so() {
    let (registry, ..) = start(|_| {}).await;
    for body in [Vec::new(), vec![b' '; 100_000]] {
        let plain = client(&[]).post(format!("http://{}/v1/gc", registry.address)).body(body).send().await.expect("an answer");
        let problem: api::Problem = serde_json::from_str(&plain.text().await.expect("text")).expect("a problem");
        assert_eq!((problem.code, problem.status, problem.retryable), (ErrorCode::InvalidRequest, 400, false));
        assert!(problem.detail.contains("write https://"), "{}", problem.detail);
    }
    assert_eq!(registry.get("/livez").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_reader_that_does_not_read_is_cut_inside_tls_too() {
    let (registry, authority, _files) = start(|config| config.body_idle_seconds = 1).await;
    let mut stream = connect(registry.address, &authority, &[]).await.expect("a handshake");
    // Answers of some 100 KiB each stay unread, until nothing more can be written.
    let cut = async {
        while stream.write_all(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n").await.is_ok() && stream.flush().await.is_ok() {}
    };
    tokio::time::timeout(FOR_EVER, cut).await.expect("the connection is closed");
}

#[tokio::test]
async fn an_upstream_is_reached_by_its_own_authority() {
    let (upstream, authority, files) = start(|_| {}).await;
    upstream.push(REPO, &snapshot(0..3, vec![]), Some("t")).await;
    let path = authority.write(files.path().join("ca.pem"));
    let url = upstream.base.clone();
    let trusting = Registry::start_with(|config| (config.upstream, config.tls_ca) = (url, path)).await;
    let _: api::SnapshotDetail = ok(trusting.get(&format!("/v1/repositories/{REPO}/snapshots/t")).await).await;
    let url = upstream.base.clone();
    let other = Authority::new().write(files.path().join("other.pem"));
    let strange = Registry::start_with(|config| (config.upstream, config.tls_ca) = (url, other)).await;
    let refused = problem(strange.get(&format!("/v1/repositories/{REPO}/snapshots/t")).await).await;
    assert_eq!(refused.code, ErrorCode::Unavailable, "{}", refused.detail);
}

#[tokio::test]
async fn what_is_no_certificate_keeps_the_registry_from_starting() {
    let (authority, dir) = (Authority::new(), tempfile::tempdir().expect("a directory"));
    let (certificate, key) = authority.certificate(&[NAME]).write(dir.path());
    let started = async |certificate: &Path, key: &Path| {
        let config = Config { tls_cert: certificate.into(), tls_key: key.into(), ..crate::common::config(&dir) };
        Server::bind(config).await.err().expect("it is refused")
    };
    let absent = started(&dir.path().join("absent"), &key).await;
    assert!(matches!(absent, Error::Tls(TlsError::Read { .. })) && absent.exit_code() == 1, "{absent}");
    let swapped = started(&key, &certificate).await;
    assert!(matches!(swapped, Error::Tls(TlsError::Missing { .. })) && swapped.exit_code() == 1, "{swapped}");
}

#[test]
fn plain_http_beyond_loopback_needs_a_word() {
    let given = |change: fn(&mut Overrides)| {
        let listen = Some(([0, 0, 0, 0], 1).into());
        let mut given = Overrides { data: Some("/data".into()), listen, require_tokens: Some(true), ..Overrides::default() };
        change(&mut given);
        Config::load(None, given)
    };
    assert!(matches!(given(|_| {}), Err(SettingsError::Plain(_))));
    assert!(given(|given| given.behind_proxy = Some(true)).is_ok());
    assert!(given(|given| given.insecure_listen_anywhere = Some(true)).is_ok());
    let pair = |given: &mut Overrides| (given.tls_cert, given.tls_key) = (Some("c".into()), Some("k".into()));
    assert!(given(pair).is_ok());
    assert!(matches!(given(|given| given.tls_cert = Some("c".into())), Err(SettingsError::HalfACertificate("tls-cert", "tls-key"))));
    assert!(matches!(given(|given| given.tls_key = Some("k".into())), Err(SettingsError::HalfACertificate("tls-key", "tls-cert"))));
    // TLS says nothing about who the caller is.
    let exposed = given(|given| (given.require_tokens, given.tls_cert, given.tls_key) = (None, Some("c".into()), Some("k".into())));
    assert!(matches!(exposed, Err(SettingsError::Exposed(_))));
    let proxy = given(|given| (given.require_tokens, given.behind_proxy) = (None, Some(true)));
    assert!(matches!(proxy, Err(SettingsError::Exposed(_))));
    assert!(matches!(given(|given| given.tls_handshake_seconds = Some(0)), Err(SettingsError::Zero("tls-handshake-seconds"))));
    let issuers = given(|given| (given.require_tokens, given.token_issuers, given.listen) = (None, Some("i".into()), None));
    assert!(matches!(issuers, Err(SettingsError::TokensNotRequired)));
}

/// The program, until it is dropped.
struct Program {
    child: std::process::Child,
    base: String,
}

impl Program {
    fn start(data: &Path, certificate: &Path, key: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(data);
        command.arg("--tls-cert").arg(certificate).arg("--tls-key").arg(key).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the program starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        let base = line.trim_end().strip_prefix("listening on ").expect("its address").to_owned();
        Self { child, base }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[tokio::test]
async fn a_hangup_has_the_certificate_read_again_and_does_not_end_the_program() {
    let (first, second, dir) = (Authority::new(), Authority::new(), tempfile::tempdir().expect("a directory"));
    let (certificate, key): (PathBuf, PathBuf) = first.certificate(&[NAME]).write(dir.path());
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut program = Program::start(&dir.path().join("data"), &certificate, &key);
    assert!(program.base.starts_with("https://127.0.0.1:"), "{}", program.base);
    // The check of an image trusts no authority, and asks for an address that no certificate needs
    // to name.
    let mut health = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    health.args(["health", "--listen"]).arg(program.base.trim_start_matches("https://"));
    let health = health.arg("--tls-cert").arg(&certificate).arg("--tls-key").arg(&key).output().expect("it runs");
    assert_eq!((health.status.code(), health.stdout), (Some(0), b"ready\n".to_vec()));
    let url = format!("{}/livez", program.base);
    assert_eq!(client(&[&first]).get(&url).send().await.expect("an answer").status(), StatusCode::OK);
    second.certificate(&[NAME]).write(dir.path());
    let hangup = Command::new("kill").args(["-HUP", &program.child.id().to_string()]).status().expect("kill runs");
    assert!(hangup.success());
    let renewed = async {
        while client(&[&second]).get(&url).send().await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(FOR_EVER, renewed).await.expect("the new certificate is never shown");
    assert!(program.child.try_wait().expect("its state").is_none(), "it ended");
}
