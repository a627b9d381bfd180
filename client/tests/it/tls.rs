//! Registries with a certificate: which of them `pf` trusts, and its messages about the others.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pull_store, push_dir};
use pfr_client::{Distrust, Error, Remote, RemoteOptions};
use pfr_schema::ErrorCode;
use pfr_service::Secret;
use pfr_store::{Domains, NewAccessToken, Options, Store};
use pfr_testkit::tls::{Authority, Certified};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A registry with this certificate. It is on 127.0.0.1.
async fn serve(certified: &Certified, require_tokens: bool) -> Registry {
    Registry::start_with(|config| {
        (config.tls_cert, config.tls_key) = certified.write(config.data.parent().unwrap());
        config.require_tokens = require_tokens;
    })
    .await
}

/// A host with the certificate of an authority in a file.
struct Host {
    home: TempDir,
    ca: PathBuf,
}

impl Host {
    fn new(authority: &Authority) -> Self {
        let home = tempfile::tempdir().unwrap();
        let ca = authority.write(home.path().join("ca.pem"));
        Self { home, ca }
    }

    /// Exit code and standard error.
    fn pf(&self, args: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
        command.env_clear().env("HOME", self.home.path()).env("PF_RETRIES", "0").envs(environment.iter().copied());
        let output = command.args(args).stdin(Stdio::null()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_goes_both_ways_with_an_authority_of_ones_own() {
    let authority = Authority::new();
    let registry = serve(&authority.certificate(&["127.0.0.1"]), false).await;
    let host = Host::new(&authority);
    let remote = Remote::new(&registry.url, RemoteOptions { extra_roots: Some(host.ca.clone()), ..RemoteOptions::default() }).unwrap();
    let source = directory(SMALL, &(0..300).collect::<Vec<_>>());
    let pushed = push_dir(&remote, source.path(), "t").await.unwrap();
    let store = Store::open_in_memory(Options::default()).await.unwrap();
    pull_store(&remote, "t", &store).await.unwrap();
    store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_is_named_by_a_flag_a_variable_or_the_file() {
    let authority = Authority::new();
    let registry = serve(&authority.certificate(&["127.0.0.1"]), false).await;
    let (host, url) = (Host::new(&authority), registry.url.as_str());
    let ca = text(&host.ca).to_owned();
    assert_eq!(host.pf(&["ls", "--registry", url, "--tls-ca", &ca], &[]), (0, String::new()));
    assert_eq!(host.pf(&["ls", "--registry", url], &[("PF_TLS_CA", &ca)]), (0, String::new()));
    let config = host.home.path().join(".config/pf");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::write(config.join("config.toml"), format!("registry = {url:?}\ntls-ca = {ca:?}\n")).unwrap();
    assert_eq!(host.pf(&["ls"], &[]), (0, String::new()));
    // A flag wins, and its file must be there.
    let (code, said) = host.pf(&["ls", "--tls-ca", "/nonexistent/ca.pem"], &[]);
    assert!(code == 5 && said.contains("/nonexistent/ca.pem"), "{code}: {said}");
    std::fs::write(host.home.path().join("empty"), "").unwrap();
    let (code, said) = host.pf(&["ls", "--tls-ca", text(&host.home.path().join("empty"))], &[]);
    assert!(code == 1 && said.contains("BEGIN CERTIFICATE"), "{code}: {said}");
    // A suggested command means the same registry, and trusts it.
    let (code, said) = host.pf(&["inspect", "team/agent:x", "--registry", url, "--tls-ca", &ca], &[]);
    assert!(code == 5 && said.contains(&format!("--registry {url} --tls-ca {ca}`")), "{code}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_is_not_trusted_is_sent_nothing_and_the_reason_is_told() {
    let authority = Authority::new();
    let host = Host::new(&authority);
    let strange = Authority::new().certificate(&["127.0.0.1"]);
    let other = authority.certificate(&["registry.example.com", "10.1.2.3"]);
    let (expired, early) = (authority.expired(&["127.0.0.1"]), authority.early(&["127.0.0.1"]));
    for (certified, reason, says, hint) in [
        (strange, Distrust::Issuer, "no authority that this machine trusts has signed it", "--tls-ca FILE"),
        (
            other,
            Distrust::Name(vec!["registry.example.com".into(), "10.1.2.3".into()]),
            "it is for registry.example.com, 10.1.2.3, and not",
            "",
        ),
        (expired, Distrust::Expired(Some(978_307_200_000)), "it expired at 2001-01-01T00:00:00.000Z; the registry needs a new one", ""),
        (early, Distrust::Early, "it is not valid yet; the clock of this machine", ""),
    ] {
        let registry = serve(&certified, false).await;
        let options = RemoteOptions { extra_roots: Some(host.ca.clone()), ..RemoteOptions::default() };
        let error = Remote::new(&registry.url, options).unwrap().stats(None).await.unwrap_err();
        assert!(matches!(&error, Error::Certificate { reason: found, .. } if *found == reason), "{reason:?}: {error:?}");
        assert_eq!((error.code(), error.retryable()), (ErrorCode::Unavailable, false), "{error}");
        let (code, said) = host.pf(&["ls", "--registry", &registry.url, "--json"], &[("PF_TLS_CA", text(&host.ca))]);
        let document: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        let message = document["message"].as_str().unwrap();
        assert!(
            code == 7 && document["code"] == "unavailable" && message.contains(says) && message.contains(&registry.url),
            "{code}: {said}"
        );
        assert_eq!(document["hint"].as_str().is_some_and(|text| text.starts_with(hint)), !hint.is_empty(), "{said}");
    }
    // Without the file, its own certificates are strange, too.
    let registry = serve(&authority.certificate(&["127.0.0.1"]), false).await;
    let (code, said) =
        host.pf(&["ls", "--registry", &registry.url], &[("SSL_CERT_FILE", text(&Authority::new().write(host.home.path().join("x"))))]);
    assert!(code == 7 && said.contains("tls-ca") && said.contains("hint: --tls-ca FILE"), "{code}: {said}");
    // Without the setting, pf trusts what the machine trusts.
    assert_eq!(host.pf(&["ls", "--registry", &registry.url], &[("SSL_CERT_FILE", text(&host.ca))]), (0, String::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_authorities_of_the_machine_are_read_only_for_https() {
    let (authority, registry) = (Authority::new(), Registry::start().await);
    let host = Host::new(&authority);
    // Without a single authority no client of TLS can be made.
    let nowhere = host.home.path().join("nowhere");
    let none = [("SSL_CERT_FILE", text(&nowhere)), ("SSL_CERT_DIR", text(&nowhere))];
    assert_eq!(host.pf(&["ls", "--registry", &registry.url], &none), (0, String::new()));
    let (code, said) = host.pf(&["ls", "--registry", &registry.url.replacen("http", "https", 1)], &none);
    assert!(code == 1 && said.contains("TLS cannot be set up"), "{code}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn http_to_a_port_that_speaks_https_says_so() {
    let authority = Authority::new();
    let registry = serve(&authority.certificate(&["127.0.0.1"]), false).await;
    let (host, plain) = (Host::new(&authority), registry.url.replacen("https", "http", 1));
    let (code, said) = host.pf(&["ls", "--registry", &plain], &[]);
    assert!(code == 1 && said.contains("speaks https, not http") && said.contains("write https://"), "{code}: {said}");
    let source = directory(SMALL, &(0..50).collect::<Vec<_>>());
    let (code, said) = host.pf(&["push", text(source.path()), &format!("{plain}/team/agent:t")], &[]);
    assert!(code == 1 && said.contains("write https://"), "{code}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_sent_over_https_without_a_setting() {
    let authority = Authority::new();
    let registry = serve(&authority.certificate(&["127.0.0.1"]), true).await;
    let new = NewAccessToken { label: "x".into(), domain: None, scopes: vec!["*:pull".parse().unwrap()], expires_at: None };
    let (token, _) = Domains::new(registry.store.clone(), None).access_tokens().create(new).await.unwrap();
    let host = Host::new(&authority);
    let environment = [("PF_REGISTRY", registry.url.as_str()), ("PF_TLS_CA", text(&host.ca)), ("PF_TOKEN", token.expose())];
    assert_eq!(host.pf(&["ls"], &environment), (0, String::new()));
    assert_eq!(host.pf(&["ls"], &environment[..2]).0, 6);
    // Beyond loopback, too.
    let options = || RemoteOptions { token: Some(Secret::new("hush")), ..RemoteOptions::default() };
    assert!(Remote::new("https://registry.example.com", options()).is_ok());
    assert!(matches!(Remote::new("http://registry.example.com", options()), Err(Error::TokenOverHttp { .. })));
}
