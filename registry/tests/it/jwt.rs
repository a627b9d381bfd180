//! Tokens of issuers: which are accepted, and what they open. A refusal does not say its reason.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, problem, refused};
use pfr_registry::{Config, Error, Server};
use pfr_schema::api::{self, Problem};
use pfr_schema::{AccessToken, ErrorCode};
use pfr_testkit::jwt::{Signer, claims, hs256, jwks, noise, now, unsigned};
use pfr_testkit::tls::Authority;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const ISSUER: &str = "https://issuer.example";
const SUBJECT: &str = "system:serviceaccount:agents:runner";
/// Longer than any of this takes, on any machine.
const FOR_EVER: Duration = Duration::from_secs(60);

/// The files of an issuer.
struct Files(TempDir);

impl Files {
    fn new(keys: &[&Signer]) -> Self {
        let files = Self(tempfile::tempdir().expect("a directory"));
        files.keys(keys);
        files.issuers(&format!("jwks-file = {:?}", files.path("keys.json")), RULES);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn keys(&self, keys: &[&Signer]) {
        std::fs::write(self.path("keys.json"), jwks(keys)).expect("written");
    }

    fn issuers(&self, keys: &str, rules: &str) {
        let text = format!("[[issuers]]\nissuer = {ISSUER:?}\naudiences = [\"pf\"]\nclock-skew-seconds = 30\n{keys}\n{rules}");
        std::fs::write(self.path("issuers.toml"), text).expect("written");
    }
}

const RULES: &str = r#"
[[issuers.rules]]
subject = "system:serviceaccount:agents:*"
scopes = ["team/*:pull,push"]

[[issuers.rules]]
subject = "operator"
claims = { groups = "pf-*" }
scopes = ["*:pull,push,delete,admin"]

[[issuers.rules]]
subject = "tenant"
scopes = ["*:pull"]
domain = "acme"
"#;

async fn start(files: &Files) -> Registry {
    let path = files.path("issuers.toml");
    Registry::start_with(|config| (config.require_tokens, config.token_issuers) = (true, path)).await
}

async fn ask(registry: &Registry, token: &str, path: &str) -> Response {
    registry.request(Method::GET, path).bearer_auth(token).send().await.expect("an answer")
}

fn of(subject: &str) -> Value {
    claims(ISSUER, "pf", subject)
}

/// Claims with one that is changed.
fn with(name: &str, value: Value) -> Value {
    let mut claims = of(SUBJECT);
    claims[name] = value;
    claims
}

#[tokio::test]
async fn a_token_opens_what_the_first_rule_that_fits_says() {
    let (rsa, ec, ed) = (Signer::rs256("rsa"), Signer::es256("ec"), Signer::eddsa("ed"));
    let files = Files::new(&[&rsa, &ec, &ed]);
    let registry = start(&files).await;
    let operator = rsa.token(&json!({"groups": ["dev", "pf-operators"], "iss": ISSUER, "aud": "pf", "sub": "operator", "exp": now() + 60}));
    let put = registry.request(Method::PUT, "/v1/domains/acme").bearer_auth(&operator).send().await.expect("an answer");
    assert_eq!(put.status(), StatusCode::CREATED);
    for signer in [&rsa, &ec, &ed] {
        let token = signer.token(&of(SUBJECT));
        let _: api::RepositoryList = ok(ask(&registry, &token, "/v1/repositories").await).await;
        // As a password, too: for clients of OCI registries.
        let basic = registry.request(Method::GET, "/v1/repositories").basic_auth("robot", Some(&token)).send().await.expect("an answer");
        assert_eq!(basic.status(), StatusCode::OK, "{}", signer.algorithm());
        refused(ask(&registry, &token, "/v1/repositories/other%2Fx/tags").await, ErrorCode::RepositoryUnknown).await;
        refused(ask(&registry, &token, "/v1/tasks").await, ErrorCode::Denied).await;
    }
    let tenant = ec.token(&of("tenant"));
    let _: api::RepositoryList = ok(ask(&registry, &tenant, "/domains/acme/v1/repositories").await).await;
    refused(ask(&registry, &tenant, "/v1/repositories").await, ErrorCode::DomainUnknown).await;
    // The same name in none of the groups.
    refused(ask(&registry, &rsa.token(&of("operator")), "/v1/repositories").await, ErrorCode::Unauthorized).await;
    // Tokens of the registry are valid beside them.
    let ours = registry.token(&["*:pull"]).await;
    let _: api::RepositoryList = ok(registry.send_as(&ours, registry.request(Method::GET, "/v1/repositories")).await).await;
}

#[tokio::test]
async fn a_snapshot_is_pushed_with_the_token_of_a_service_account() {
    let signer = Signer::rs256("k");
    let files = Files::new(&[&signer]);
    let mut registry = start(&files).await;
    let mut headers = reqwest::header::HeaderMap::new();
    let bearer = format!("Bearer {}", signer.token(&of(SUBJECT)));
    headers.insert("authorization", bearer.parse().expect("a header"));
    registry.client = reqwest::Client::builder().no_proxy().default_headers(headers).build().expect("a client");
    let sample = snapshot(0..5, vec![]);
    registry.push(REPO, &sample, Some("t")).await;
    assert_eq!(registry.fetch(REPO, &sample.digests()).await.len(), sample.blobs.len());
    assert_eq!(registry.delete(&format!("/v1/repositories/{REPO}/tags/t")).await.status(), StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_subject_is_named_in_the_audit_log_and_is_one_caller_with_all_its_tokens() {
    let signer = Signer::es256("k");
    let files = Files::new(&[&signer]);
    let path = files.path("issuers.toml");
    let registry = Registry::start_with(|config| {
        (config.require_tokens, config.token_issuers) = (true, path);
        (config.caller_requests_per_second, config.burst_seconds) = (1, 5);
    })
    .await;
    let status = async |subject: &str, number: usize| {
        let mut claims = of(subject);
        claims["jti"] = json!(number.to_string());
        ask(&registry, &signer.token(&claims), "/v1/tasks").await.status()
    };
    let mut denied = 0;
    while status(SUBJECT, denied).await == StatusCode::FORBIDDEN {
        denied += 1;
        assert!(denied < 100, "never limited");
    }
    assert!(denied >= 5, "{denied}");
    assert_eq!(status("system:serviceaccount:agents:other", 0).await, StatusCode::FORBIDDEN, "another subject is another caller");
    assert_eq!(status("tenant", 0).await, StatusCode::NOT_FOUND);

    let operator = registry.token(&["*:admin"]).await;
    let list: api::AuditList = ok(ask(&registry, operator.expose(), "/v1/audit").await).await;
    let [tenant, other, first] = &list.records[..] else { panic!("{:?}", list.records) };
    let name = |subject: &str| Some(format!("{subject} of {ISSUER}"));
    assert_eq!((&first.token, &first.label, &first.token_domain), (&name(SUBJECT), &None, &None));
    assert_eq!((first.outcome, first.code.as_deref()), (api::AuditOutcome::Refused, Some("denied")));
    assert_eq!(other.token, name("system:serviceaccount:agents:other"));
    assert_eq!((&tenant.token, tenant.token_domain.as_ref().map(|domain| domain.as_str())), (&name("tenant"), Some("acme")));
    let of_subject = format!("/v1/audit?token={}", name(SUBJECT).unwrap_or_default().replace(' ', "%20"));
    let list: api::AuditList = ok(ask(&registry, operator.expose(), &of_subject).await).await;
    assert_eq!(list.records.iter().map(|record| record.number).collect::<Vec<_>>(), [first.number]);
}

/// Everything but the id of the request.
fn plain(mut problem: Problem) -> Problem {
    problem.request_id = None;
    problem
}

#[tokio::test]
async fn every_other_token_gets_the_same_401_as_any_bad_token() {
    let (rsa, ec, stranger) = (Signer::rs256("k"), Signer::es256("ec"), Signer::es256("ec"));
    let files = Files::new(&[&rsa, &ec]);
    let registry = start(&files).await;
    let unknown = AccessToken::new([0; 8], [0; 32]);
    let expected = plain(problem(ask(&registry, unknown.expose(), "/v1/repositories").await).await);
    assert_eq!(expected.code, ErrorCode::Unauthorized);

    let (head, now) = (|alg: &str| json!({"alg": alg, "typ": "JWT", "kid": "k"}), now());
    let public = [
        rsa.jwk()["n"].as_str().expect("text").as_bytes().to_vec(),
        rsa.jwk().to_string().into_bytes(),
        std::fs::read(files.path("keys.json")).expect("keys"),
    ];
    let good = ec.token(&of(SUBJECT));
    let (message, signature) = good.rsplit_once('.').expect("parts");
    let (header, _) = message.split_once('.').expect("parts");
    let others = ec.token(&of("operator"));
    let other_payload = others.split('.').nth(1).expect("parts");
    let mut tokens = vec![
        ("expired", ec.token(&with("exp", json!(now - 31)))),
        ("expired long ago", ec.token(&with("exp", json!(0)))),
        ("expires as text", ec.token(&with("exp", json!("9999999999")))),
        ("expires before all time", ec.token(&with("exp", json!(-1)))),
        ("never expires", ec.token(&with("exp", Value::Null))),
        ("not valid yet", ec.token(&with("nbf", json!(now + 60)))),
        ("valid from a text on", ec.token(&with("nbf", json!("0")))),
        ("another audience", ec.token(&with("aud", json!("pf2")))),
        ("other audiences", ec.token(&with("aud", json!(["a", "b"])))),
        ("no audience", ec.token(&with("aud", Value::Null))),
        ("no list of audiences", ec.token(&with("aud", json!([])))),
        ("another issuer", ec.token(&with("iss", json!("https://issuer.example.org")))),
        ("several issuers", ec.token(&with("iss", json!([ISSUER, "https://x"])))),
        ("no issuer", ec.token(&with("iss", Value::Null))),
        ("no subject", ec.token(&with("sub", Value::Null))),
        ("a subject of another kind", ec.token(&with("sub", json!([SUBJECT])))),
        ("no rule", ec.token(&of("system:serviceaccount:other:runner"))),
        ("nearly a rule", ec.token(&of("a system:serviceaccount:agents:runner"))),
        ("no signature", unsigned(&head("none"), &of(SUBJECT))),
        ("no signature, and another name for none", unsigned(&head("nOnE"), &of(SUBJECT))),
        ("no signature, and a real algorithm", unsigned(&head("RS256"), &of(SUBJECT))),
        ("a key of the same name", stranger.token(&of(SUBJECT))),
        ("an unknown key", Signer::es256("new").token(&of(SUBJECT))),
        ("the key of another algorithm", ec.token_with(&head("ES256"), &of(SUBJECT))),
        ("another algorithm of the same key", rsa.token_with(&head("RS512"), &of(SUBJECT))),
        ("its own key", stranger.token_with(&json!({"alg": "ES256", "kid": "ec", "jwk": stranger.jwk()}), &of(SUBJECT))),
        ("its own place of keys", stranger.token_with(&json!({"alg": "ES256", "kid": "ec", "jku": "https://stranger"}), &of(SUBJECT))),
        ("a critical header", ec.token_with(&json!({"alg": "ES256", "kid": "ec", "crit": ["b64"], "b64": false}), &of(SUBJECT))),
        ("no algorithm", ec.token_with(&json!({"kid": "ec"}), &of(SUBJECT))),
        ("claims of another", format!("{header}.{other_payload}.{signature}")),
        ("without its signature", format!("{message}.")),
        ("half of its signature", format!("{message}.{}", &signature[..signature.len() / 2])),
        ("claims that are no object", ec.token(&json!([1]))),
        ("noise", format!("{}.{}.{}", noise(40), noise(300), noise(64))),
        ("two parts", message.to_owned()),
        ("huge", format!("{message}.{}", noise(20_000))),
        ("huge claims", ec.token(&with("x", json!("x".repeat(17 << 10))))),
    ];
    for secret in public {
        tokens.push(("signed with the public key as a secret", hs256(&secret, &head("HS256"), &of(SUBJECT))));
    }
    for (what, token) in tokens {
        let answer = ask(&registry, &token, "/v1/repositories").await;
        assert_eq!(answer.headers().get_all("www-authenticate").iter().count(), 2, "{what}");
        assert_eq!(plain(problem(answer).await), expected, "{what}");
    }
    // The good one is good, and times have the skew that was set.
    for token in
        [good, ec.token(&with("exp", json!(now - 5))), ec.token(&with("nbf", json!(now + 20))), ec.token(&with("aud", json!("pf")))]
    {
        assert_eq!(ask(&registry, &token, "/v1/repositories").await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_key_and_the_rules_are_changed_while_the_registry_serves() {
    let (old, new) = (Signer::es256("old"), Signer::es256("new"));
    let files = Files::new(&[&old]);
    let registry = start(&files).await;
    let (with_old, with_new) = (old.token(&of(SUBJECT)), new.token(&of(SUBJECT)));
    let status = async |token: &str| ask(&registry, token, "/v1/repositories").await.status();
    assert_eq!((status(&with_old).await, status(&with_new).await), (StatusCode::OK, StatusCode::UNAUTHORIZED));
    let until = async |token: &str, wanted: StatusCode| {
        let repeat = async {
            while status(token).await != wanted {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(FOR_EVER, repeat).await.unwrap_or_else(|_| panic!("never {wanted}"));
    };
    let reloader = registry.reloader.clone().expect("there are issuers");
    files.keys(&[&old, &new]);
    reloader.reload();
    until(&with_new, StatusCode::OK).await;
    assert_eq!(status(&with_old).await, StatusCode::OK);
    files.keys(&[&new]);
    reloader.reload();
    until(&with_old, StatusCode::UNAUTHORIZED).await;
    // What cannot be used changes nothing.
    for broken in ["keys.json", "issuers.toml"] {
        let good = std::fs::read(files.path(broken)).expect("read");
        std::fs::write(files.path(broken), "{").expect("written");
        reloader.reload();
        let operator = registry.token(&["*:admin"]).await;
        let counted = async {
            let count = |text: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix("pf_reload_errors_total{what=\"issuers\"} "));
                line.and_then(|value| value.parse::<f64>().ok()).unwrap_or_default()
            };
            let wanted = if broken == "keys.json" { 1.0 } else { 2.0 };
            while count(&ask(&registry, operator.expose(), "/metrics").await.text().await.expect("text")) < wanted {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(FOR_EVER, counted).await.expect("the failure is counted");
        assert_eq!(status(&with_new).await, StatusCode::OK, "{broken}");
        std::fs::write(files.path(broken), good).expect("written");
        reloader.reload();
    }
    // The account loses its rule. This is noticed without a signal.
    files.issuers(&format!("jwks-file = {:?}", files.path("keys.json")), &RULES.replace("serviceaccount:agents", "serviceaccount:others"));
    until(&with_new, StatusCode::UNAUTHORIZED).await;
}

/// An issuer that publishes its keys over https, and says how often it was asked.
struct Publisher {
    url: String,
    asked: Arc<AtomicUsize>,
}

impl Publisher {
    async fn start(authority: &Authority, dir: &Path, answer: String) -> Self {
        let (certificate, key) = authority.certificate(&["127.0.0.1"]).write(dir);
        let pem = |path: &Path| std::fs::read(path).expect("a file");
        use rustls::pki_types::pem::PemObject as _;
        let chain = vec![rustls::pki_types::CertificateDer::from_pem_slice(&pem(&certificate)).expect("a certificate")];
        let key = rustls::pki_types::PrivateKeyDer::from_pem_slice(&pem(&key)).expect("a key");
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).expect("a pair");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("https://{}/keys", listener.local_addr().expect("an address"));
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                // A client that does not trust it leaves.
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                counter.fetch_add(1, Ordering::SeqCst);
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        Self { url, asked }
    }
}

fn http(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nlocation: https://127.0.0.1:1/\r\nconnection: close\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn keys_are_fetched_once_and_not_for_each_token_of_a_stranger() {
    let (signer, authority) = (Signer::es256("k"), Authority::new());
    let files = Files::new(&[&signer]);
    let publisher = Publisher::start(&authority, files.0.path(), http("200 OK", &jwks(&[&signer]))).await;
    files.issuers(&format!("jwks-url = {:?}", publisher.url), RULES);
    let (path, ca) = (files.path("issuers.toml"), authority.write(files.path("ca.pem")));
    let registry = Registry::start_with(|config| (config.require_tokens, config.token_issuers, config.tls_ca) = (true, path, ca)).await;
    let good = signer.token(&of(SUBJECT));
    for _ in 0..5 {
        assert_eq!(ask(&registry, &good, "/v1/repositories").await.status(), StatusCode::OK);
        let unknown = Signer::es256("stranger").token(&of(SUBJECT));
        refused(ask(&registry, &unknown, "/v1/repositories").await, ErrorCode::Unauthorized).await;
    }
    assert_eq!(publisher.asked.load(Ordering::SeqCst), 1);
    // A change of the rules keeps the keys.
    registry.reloader.clone().expect("there are issuers").reload();
    assert_eq!(ask(&registry, &good, "/v1/repositories").await.status(), StatusCode::OK);
    assert_eq!(publisher.asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_issuer_without_keys_says_nothing_about_its_tokens() {
    let (signer, authority) = (Signer::es256("k"), Authority::new());
    let good = signer.token(&of(SUBJECT));
    let keys = jwks(&[&signer]);
    for (what, answer, trusted) in [
        ("it fails", http("500 Internal Server Error", &keys), true),
        ("it leads elsewhere", http("302 Found", &keys), true),
        ("it has no keys", http("200 OK", "{\"keys\": []}"), true),
        ("it is not trusted", http("200 OK", &keys), false),
        ("it never ends", http("200 OK", &" ".repeat(400 << 10)), true),
    ] {
        let files = Files::new(&[&signer]);
        let publisher = Publisher::start(&authority, files.0.path(), answer).await;
        files.issuers(&format!("jwks-url = {:?}", publisher.url), RULES);
        let other = Authority::new();
        let ca = if trusted { &authority } else { &other }.write(files.path("ca.pem"));
        let path = files.path("issuers.toml");
        let registry = Registry::start_with(|config| (config.require_tokens, config.token_issuers, config.tls_ca) = (true, path, ca)).await;
        let problem = problem(ask(&registry, &good, "/v1/repositories").await).await;
        assert_eq!((problem.code, problem.status, problem.retryable), (ErrorCode::Unavailable, 503, true), "{what}: {}", problem.detail);
        assert!(!problem.detail.contains("127.0.0.1"), "{what}: {}", problem.detail);
        // Others do not depend on it.
        let ours = registry.token(&["*:pull"]).await;
        let _: api::RepositoryList = ok(registry.send_as(&ours, registry.request(Method::GET, "/v1/repositories")).await).await;
    }
}

#[tokio::test]
async fn what_is_no_list_of_issuers_keeps_the_registry_from_starting() {
    let files = Files::new(&[&Signer::es256("k")]);
    let dir = tempfile::tempdir().expect("a directory");
    let started = async || {
        let config = Config { require_tokens: true, token_issuers: files.path("issuers.toml"), ..crate::common::config(&dir) };
        Server::bind(config).await.err().expect("it is refused")
    };
    for (keys, rules, says) in [
        ("jwks-file = \"/nonexistent/keys\"", RULES, "cannot read /nonexistent/keys"),
        ("", RULES, "jwks-file or jwks-url"),
        ("jwks-url = \"http://issuer.example\"", RULES, "https://"),
        ("jwks-url = \"https://issuer.example\"", "", "rules"),
    ] {
        files.issuers(keys, rules);
        let error = started().await;
        assert!(matches!(error, Error::Issuers(_)) && error.exit_code() == 1 && error.to_string().contains(says), "{error}");
    }
    std::fs::remove_file(files.path("issuers.toml")).expect("removed");
    assert!(started().await.to_string().contains("issuers.toml"));
}
