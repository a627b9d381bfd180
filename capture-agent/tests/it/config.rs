//! Settings: the template parses, stronger sources win, secrets stay secret.

use pfr_agent::Config;
use pfr_agent::config::Overrides;
use pfr_agent::llama::LlamaServer;
use pfr_client::{ByteSize, StoredTokens};
use pfr_service::{LogFormat, Secret, UserDirs};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn home() -> UserDirs {
    UserDirs { home: Some("/h".into()), ..UserDirs::default() }
}

fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pf-agent.toml");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn the_template_parses_and_shows_the_defaults() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("pf-agent.toml");
    let config = Config::load(Some(&template), Overrides::default(), &home()).unwrap();
    let defaults = Config::new("/var/lib/pf-agent");
    let socket = PathBuf::from("/run/pf-agent/agent.sock");
    let engine_socket = PathBuf::from("/run/pf-agent/engines.sock");
    assert_eq!(
        config,
        Config {
            socket,
            engine_socket,
            registry: Some("http://127.0.0.1:5077".into()),
            stored_tokens: StoredTokens::of(&home()),
            ..defaults
        }
    );
    // Keys that are shown as comments are keys.
    let text = std::fs::read_to_string(&template).unwrap();
    let is_key = |line: &&str| line.split_once(" = ").is_some_and(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'));
    let uncommented = |line: &str| line.strip_prefix("# ").filter(is_key).unwrap_or(line).to_owned() + "\n";
    // The token and the file with it exclude each other.
    let shown: String = text.lines().filter(|line| !line.starts_with("# token = ")).map(uncommented).collect();
    let (_dir, path) = file(&shown);
    let error = Config::load(Some(&path), Overrides::default(), &home()).unwrap_err().to_string();
    assert!(error.contains("/etc/pf-agent/token"), "{error}");
}

#[test]
fn flags_win_over_the_file_and_that_over_the_defaults() {
    let (_dir, path) = file("ring-bytes = 500000\nengine-timeout = 7\nlog-format = \"json\"\nregistry = \"http://file/\"\n");
    let flags = Overrides { ring_bytes: Some(ByteSize(900_000)), ..Overrides::default() };
    let config = Config::load(Some(&path), flags, &home()).unwrap();
    assert_eq!((config.ring_bytes, config.engine_timeout, config.log_format), (900_000, Duration::from_secs(7), LogFormat::Json));
    assert_eq!(config.registry.as_deref(), Some("http://file"));
    assert_eq!(config.shutdown_grace, Duration::from_secs(30));
    let (_dir, path) = file("ring-bytes = \"2MiB\"\n");
    assert_eq!(Config::load(Some(&path), Overrides::default(), &home()).unwrap().ring_bytes, 2 << 20);
}

#[test]
fn places_follow_the_environment() {
    let config = Config::load(None, Overrides::default(), &home()).unwrap();
    assert_eq!(config.data, Path::new("/h/.local/share/pf/agent"));
    assert_eq!(config.socket, Path::new("/h/.local/share/pf/agent/agent.sock"));
    let xdg = UserDirs { data_home: Some("/d".into()), runtime: Some("/r".into()), ..home() };
    let config = Config::load(None, Overrides::default(), &xdg).unwrap();
    assert_eq!((config.data.as_path(), config.store_dir()), (Path::new("/d/pf/agent"), PathBuf::from("/d/pf/agent/store")));
    assert_eq!((config.socket.as_path(), config.engine_socket.as_path()), (Path::new("/r/pf/agent.sock"), Path::new("/r/pf/engines.sock")));
    assert!(Config::load(None, Overrides::default(), &UserDirs::default()).unwrap_err().to_string().contains("--data"));
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    for (text, word) in [
        ("ring-byte = 5", "ring-byte"),
        ("ring-bytes = 0", "the least is 65536"),
        ("ring-bytes = 65535", "ring-bytes is 65535; the least is 65536"),
        ("restore-bytes = 65535", "restore-bytes is 65535; the least is 65536"),
        ("engine-timeout = 0", "engine-timeout"),
        ("pause-limit = 0", "pause-limit"),
        ("push-retry-ms = 0", "push-retry-ms"),
        ("push-retry-max = 0", "push-retry-max"),
        ("report-interval = 3601", "the most is 3600"),
        ("report-name = \"a b\"", "invalid agent name"),
        ("max-store-size = \"0\"", "max-store-size"),
        ("compression = \"warm\"", "expected one of `hot`, `cold`, `off`"),
        ("metrics-listen = \"0.0.0.0:1\"", "loopback"),
        ("registry = \"ftp://x\"", "ftp://x"),
        ("socket = \"/a\"\nengine-socket = \"/a\"", "engine-socket"),
        ("token = \"a\"\ntoken-file = \"b\"", "token-file"),
        ("token = \"\"", "empty"),
        ("llama = [{ name = \"a b\", url = \"http://h:1\", slot-save-path = \"/s\" }]", "a b"),
        ("llama = [{ name = \"l\", url = \"ftp://h\", slot-save-path = \"/s\" }]", "ftp://h"),
        ("llama = [{ name = \"l\", url = \"http://h:1\", slot-save-path = \"slots\" }]", "absolute"),
        ("llama = [{ name = \"l\", url = \"http://h:1\" }]", "slot-save-path"),
        ("llama = [{ name = \"l\", url = \"http://h:1\", slot-save-path = \"/s\", modl = \"/m\" }]", "modl"),
        (
            "[[llama]]\nname = \"l\"\nurl = \"http://h:1\"\nslot-save-path = \"/s\"\n[[llama]]\nname = \"l\"\nurl = \"http://h:2\"\nslot-save-path = \"/s\"",
            "two servers",
        ),
    ] {
        let (_dir, path) = file(text);
        let error = Config::load(Some(&path), Overrides::default(), &home()).unwrap_err();
        assert!(error.to_string().contains(word), "{text}: {error}");
    }
}

#[test]
fn servers_of_llama_cpp_are_named_by_a_flag_or_a_table() {
    let flag: LlamaServer = "name=l,url=http://h:1,slot-save-path=/s".parse().unwrap();
    let (_dir, path) = file("[[llama]]\nname = \"l\"\nurl = \"http://h:1\"\nslot-save-path = \"/s\"\n");
    let config = Config::load(Some(&path), Overrides::default(), &home()).unwrap();
    assert_eq!(config.llama, [flag]);
    for text in ["name=l", "name=l,name=m", "l", "name=l,url=http://h:1,slot-save-path=/s,x=y"] {
        assert!(text.parse::<LlamaServer>().is_err(), "{text}");
    }
}

#[test]
fn the_table_on_the_page_of_llama_cpp_is_taken() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/llama-cpp.md")).unwrap();
    let table = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block of TOML");
    // Keys that are shown as comments are keys.
    let shown = table.replace("\n# ", "\n");
    let (_dir, path) = file(&shown);
    let config = Config::load(Some(&path), Overrides::default(), &home()).unwrap();
    let [server] = &config.llama[..] else { panic!("{:?}", config.llama) };
    assert_eq!((server.name.as_str(), server.model.as_deref()), ("llama-0", Some(Path::new("/models/model.gguf"))));
    assert_eq!(server.api_key_file.as_deref(), Some(Path::new("/etc/pf-agent/llama-key")));
}

#[test]
fn no_error_of_the_file_says_a_token() {
    for text in ["tokn = \"hush\"", "token = \"hush", "token = [\"hush\"]", "registry = \"r\"\ntoken = 'hush' x"] {
        let (_dir, path) = file(text);
        let error = Config::load(Some(&path), Overrides::default(), &home()).unwrap_err();
        assert!(!error.to_string().contains("hush"), "{error}");
    }
}

#[test]
fn a_token_is_not_printed_and_a_stranger_does_not_get_it() {
    let (_dir, path) = file("registry = \"https://own\"\ntoken = \"hush\"\n");
    let config = Config::load(Some(&path), Overrides::default(), &home()).unwrap();
    assert!(!format!("{config:?}").contains("hush"));
    assert!(config.token.is_some());
    let error = Config { registry: Some("https://own".into()), ..config }.remote("https://user:pw@own").unwrap_err();
    assert!(!error.to_string().contains("hush"));
}

/// A registry that would be sent a token over plain http is refused, and so the refusal says which
/// registries are sent one.
#[test]
fn the_agents_token_and_stored_tokens_go_to_their_registries_only() {
    let home = tempfile::tempdir().unwrap();
    let dirs = UserDirs { home: Some(home.path().into()), ..UserDirs::default() };
    let (_dir, path) = file("registry = \"https://own\"\ntoken = \"hush\"\n");
    let load = |given: Overrides| Config::load(Some(&path), given, &dirs).unwrap();
    let own = |url: &str, given: Overrides| Config { registry: Some("http://own".into()), ..load(given) }.remote(url);
    assert!(own("http://own", Overrides::default()).unwrap_err().to_string().contains("plain http"));
    assert!(own("http://own/domains/acme", Overrides::default()).is_err());
    assert!(own("http://stranger", Overrides::default()).is_ok());
    assert!(own("http://own", Overrides { token_over_http: Some(true), ..Overrides::default() }).is_ok());
    // A login of the agent's user counts from then on, without a restart.
    let config = load(Overrides::default());
    assert!(config.remote("http://other").is_ok());
    StoredTokens::of(&dirs).store("http://other", &Secret::new("hush")).unwrap();
    assert!(config.remote("http://other").unwrap_err().to_string().contains("plain http"));
    assert!(config.remote("http://stranger").is_ok());
    assert!(config.remote("http://127.0.0.1:1").is_ok());
}

#[test]
fn a_token_file_is_read_for_each_use_and_goes_to_its_registry_only() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "first\n").unwrap();
    let given = Overrides { registry: Some("https://own".into()), token_file: Some(token.clone()), ..Overrides::default() };
    let config = Config::load(None, given, &home()).unwrap();
    let config = Config { registry: Some("http://own".into()), ..config };
    let refusal = |config: &Config| config.remote("http://own").unwrap_err().to_string();
    assert!(refusal(&config).contains("plain http"), "there is a token: {}", refusal(&config));
    std::fs::write(&token, " \n").unwrap();
    assert!(refusal(&config).contains("is empty"), "{}", refusal(&config));
    std::fs::remove_file(&token).unwrap();
    assert!(refusal(&config).contains("token file"), "{}", refusal(&config));
    assert!(config.remote("http://stranger").is_ok());
}

#[test]
fn authorities_are_named_by_a_file_that_must_be_there() {
    let (_dir, path) = file("registry = \"https://own\"\ntls-ca = \"/nonexistent/ca.pem\"\n");
    let error = Config::load(Some(&path), Overrides::default(), &home()).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/ca.pem"), "{error}");
    let none = Overrides { tls_ca: Some("".into()), ..Overrides::default() };
    assert!(Config::load(Some(&path), none, &home()).unwrap().tls_ca.is_none());
}
