//! `pf login`: a token is stored only if its registry accepts it, is sent to that registry and to
//! no other, and is shown nowhere.

use crate::common::Registry;
use crate::common::sample::{SMALL, directory};
use pfr_schema::AccessToken;
use pfr_store::{Domains, NewAccessToken};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

async fn start() -> Registry {
    Registry::start_with(|config| config.require_tokens = true).await
}

async fn token(registry: &Registry, domain: Option<&str>, scope: &str) -> AccessToken {
    let (label, scopes) = ("test".to_owned(), vec![scope.parse().unwrap()]);
    let new = NewAccessToken { label, domain: domain.map(|name| name.parse().unwrap()), scopes, expires_at: None };
    Domains::new(registry.store.clone(), None).access_tokens().create(new).await.unwrap().0
}

/// A user with a home, and what is typed or piped into `pf`.
struct User {
    home: TempDir,
}

impl User {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.home.path().join(".config/pf/tokens.json")
    }

    /// Exit code, and both streams.
    fn pf(&self, args: &[&str], stdin: &str, environment: &[(&str, &str)]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
        command.env_clear().env("HOME", self.home.path()).args(args).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that fails early reads nothing.
        drop(child.stdin.take().unwrap().write_all(stdin.as_bytes()));
        let output = child.wait_with_output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let mut tokens = text.split("pft_").skip(1).filter(|rest| rest.starts_with(|c: char| c.is_ascii_hexdigit()));
        assert!(tokens.next().is_none(), "a token is shown: {text}");
        (output.status.code().unwrap(), text)
    }
}

/// A server that is no registry: it answers with a redirect to another address, or refuses, and
/// keeps what it was sent.
fn recorder(redirect_to: Option<String>) -> (String, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, heard) = (format!("http://{}", listener.local_addr().unwrap()), Arc::new(Mutex::new(String::new())));
    let record = Arc::clone(&heard);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut buffer = [0; 8192];
            let read = stream.read(&mut buffer).unwrap_or(0);
            record.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
            let head = match &redirect_to {
                Some(url) => format!("HTTP/1.1 307 Temporary Redirect\r\nlocation: {url}/v1/repositories\r\n"),
                None => "HTTP/1.1 401 Unauthorized\r\n".to_owned(),
            };
            drop(stream.write_all(format!("{head}content-length: 0\r\nconnection: close\r\n\r\n").as_bytes()));
        }
    });
    (url, heard)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_stored_only_if_the_registry_accepts_it() {
    let (registry, user) = (start().await, User::new());
    let url = registry.url.as_str();
    let token = token(&registry, None, "*:pull,push").await;

    let (code, text) = user.pf(&["ls", "--registry", url], "", &[]);
    assert_eq!(code, 6, "{text}");
    // The hint is the command that helps.
    let command = text.split('`').nth(1).unwrap_or_else(|| panic!("a command in {text}")).to_owned();
    assert_eq!(command, format!("pf login --registry {url}"));

    let unknown = AccessToken::new([0; 8], [0; 32]);
    let mistyped = token.expose().replace("pft_", "pft_0");
    for (given, exits, says) in [
        (unknown.expose(), 6, "refuses this token"),
        (mistyped.as_str(), 1, "93 characters"),
        ("anything", 6, "refuses this token"),
        ("", 1, "no token was given"),
    ] {
        let (code, text) = user.pf(&["login", url], given, &[]);
        assert!(code == exits && text.contains(says), "{code}: {text}");
        assert!(!user.file().exists(), "something was stored: {text}");
    }

    let args: Vec<&str> = command.split(' ').skip(1).collect();
    let (code, text) = user.pf(&args, &format!("{}\n", token.expose()), &[]);
    assert!(code == 0 && text.contains(&format!("logged in to {url}")), "{text}");
    assert_eq!(std::fs::metadata(user.file()).unwrap().permissions().mode() & 0o777, 0o600);
    let source = directory(SMALL, &[1, 2, 3]);
    let reference = format!("{url}/team/agent:x");
    let (code, text) = user.pf(&["push", source.path().to_str().unwrap(), &reference], "", &[]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = user.pf(&["ls", "--registry", url], "", &[]);
    assert!(code == 0 && text.contains("team/agent"), "{text}");
    // What it does not permit is named as such.
    let (code, text) = user.pf(&["rm", &reference], "", &[]);
    assert!(code == 6 && text.contains("delete") && text.contains("operator"), "{text}");

    let (code, text) = user.pf(&["logout", url], "", &[]);
    assert!(code == 0 && text.contains("logged out"), "{text}");
    assert_eq!(user.pf(&["ls", "--registry", url], "", &[]).0, 6);
    let (code, text) = user.pf(&["logout", url], "", &[]);
    assert!(code == 0 && text.contains("no token is stored"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_comes_from_a_file_or_the_environment_too() {
    let (registry, user) = (start().await, User::new());
    let url = registry.url.as_str();
    let token = token(&registry, None, "*:pull").await;
    let file = user.home.path().join("token");
    std::fs::write(&file, format!("{}\n", token.expose())).unwrap();
    let (code, text) = user.pf(&["login", url, "--token-file", file.to_str().unwrap(), "--json"], "", &[]);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(code == 0 && document["registry"] == url, "{text}");
    assert_eq!(user.pf(&["ls", "--registry", url], "", &[]).0, 0);
    let (code, text) = user.pf(&["login", url, "--token-file", "/nonexistent"], "", &[]);
    assert!(code == 5 && text.contains("/nonexistent"), "{text}");
    // The environment wins over what is stored.
    let wrong = [("PF_TOKEN", "wrong")];
    assert_eq!(user.pf(&["ls", "--registry", url], "", &wrong).0, 6);
    let other = User::new();
    assert_eq!(other.pf(&["ls"], "", &[("PF_TOKEN", token.expose()), ("PF_REGISTRY", url)]).0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_one_domain_is_stored_for_that_domain() {
    let (registry, user) = (start().await, User::new());
    let acme: pfr_schema::DomainName = "acme".parse().unwrap();
    let operator = token(&registry, None, "*:admin").await;
    drop(rustls::crypto::ring::default_provider().install_default());
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let made = http.put(format!("{}/v1/domains/{acme}", registry.url)).bearer_auth(operator.expose()).send().await.unwrap();
    assert!(made.status().is_success());
    let token = token(&registry, Some("acme"), "*:pull").await;
    let (code, text) = user.pf(&["login", &registry.url], token.expose(), &[]);
    assert!(code == 5 && text.contains("/domains/NAME") && !user.file().exists(), "{text}");
    assert!(text.contains("nothing was stored") && text.contains("for the domain acme"), "{text}");
    let address = format!("{}/domains/acme", registry.url);
    assert_eq!(user.pf(&["login", &address], token.expose(), &[]).0, 0);
    assert_eq!(user.pf(&["ls", "--registry", &address], "", &[]).0, 0);
    assert_eq!(user.pf(&["ls", "--registry", &registry.url], "", &[]).0, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_a_token_does_not_permit_says_which_scope_it_needs() {
    let (registry, user) = (start().await, User::new());
    let of_team = token(&registry, None, "team/*:pull,push").await;
    let source = directory(SMALL, &[1, 2]);
    let push = |reference: &str| {
        let arguments = ["push", source.path().to_str().unwrap(), reference, "--registry", registry.url.as_str()];
        user.pf(&arguments, "", &[("PF_TOKEN", of_team.expose())])
    };
    assert_eq!(push("team/agent:x").0, 0);
    let (code, text) = push("other/agent:x");
    assert!(code == 5 && text.contains("the scope other/agent:push"), "{code}: {text}");
    assert!(text.contains(&format!("`pf login --registry {}` stores it", registry.url)) && !text.contains("`pf ls"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_requires_no_token_has_no_login() {
    let (registry, user) = (Registry::start().await, User::new());
    let (code, text) = user.pf(&["login", &registry.url], "anything", &[]);
    assert!(code == 1 && text.contains("requires no token") && !user.file().exists(), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_other_server_gets_the_token() {
    let (registry, user) = (start().await, User::new());
    let token = token(&registry, None, "*:pull").await;
    let url = registry.url.as_str();
    assert_eq!(user.pf(&["login", url], token.expose(), &[]).0, 0);
    // Another registry: by a flag, by a reference, with the token in the environment and in the
    // file.
    let (stranger, heard) = recorder(None);
    std::fs::write(user.home.path().join(".config/pf/config.toml"), format!("registry = \"{url}\"\ntoken = \"{}\"\n", token.expose()))
        .unwrap();
    let environment = [("PF_TOKEN", token.expose()), ("PF_REGISTRY", url)];
    assert_eq!(user.pf(&["ls", "--registry", &stranger], "", &[]).0, 6);
    for environment in [&[][..], &environment] {
        assert_eq!(user.pf(&["inspect", &format!("{stranger}/team/agent:x")], "", environment).0, 6);
    }
    let heard = heard.lock().unwrap().clone();
    assert!(heard.contains("GET /v1/repositories"), "{heard}");
    assert!(!heard.contains("pft_") && !heard.to_lowercase().contains("authorization"), "{heard}");

    // A redirect of the registry itself: it is not followed.
    let (elsewhere, heard_there) = recorder(None);
    let (redirecting, heard_here) = recorder(Some(elsewhere));
    let environment = [("PF_TOKEN", token.expose()), ("PF_REGISTRY", redirecting.as_str())];
    let (code, text) = user.pf(&["ls"], "", &environment);
    assert!(code != 0, "{text}");
    assert!(heard_here.lock().unwrap().contains("Bearer pft_"), "its own registry gets the token");
    assert_eq!(heard_there.lock().unwrap().as_str(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_does_not_leave_this_machine_over_plain_http_unless_that_is_allowed() {
    let user = User::new();
    let environment = [("PF_TOKEN", "hush"), ("PF_REGISTRY", "http://registry.invalid")];
    let (code, text) = user.pf(&["ls"], "", &environment);
    assert!(code == 1 && text.contains("plain http") && text.contains("PF_TOKEN_OVER_HTTP"), "{text}");
    let allowed = [environment[0], environment[1], ("PF_TOKEN_OVER_HTTP", "1"), ("PF_RETRIES", "0")];
    assert_eq!(user.pf(&["ls"], "", &allowed).0, 7, "it is asked, and there is no such host");
    let (code, text) = user.pf(&["login", "http://registry.invalid", "--retries", "0"], "hush", &[]);
    assert!(code != 0 && !user.file().exists(), "{text}");
}

#[test]
fn the_word_of_other_tools_leads_to_the_command() {
    let (code, text) = User::new().pf(&["auth"], "", &[("PF_REGISTRY", "http://r:1")]);
    assert!(code == 1 && text.contains("`pf login --registry http://r:1` stores a token"), "{text}");
}
