//! Settings: the template is true, names follow one rule, and nothing misspelt is taken for
//! nothing.

use clap::{Args as _, CommandFactory as _};
use pfr_registry::config::{Config, Overrides, SettingsError};
use pfr_service::settings::FileError;
use std::path::{Path, PathBuf};

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    overrides: Overrides,
}

fn template() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pf-registry.toml")
}

#[test]
fn the_template_parses_and_shows_every_default() {
    let text = std::fs::read_to_string(template()).expect("the template");
    let overrides: Overrides = toml::from_str(&text).expect("the template parses");
    let given = format!("{overrides:?}");
    assert!(!given.contains("None"), "the template leaves something out: {given}");
    assert_eq!(overrides.or_default(), Config { data: "/var/lib/pf-registry".into(), ..Config::default() });
}

#[test]
fn every_setting_is_a_flag_a_variable_a_key_and_is_documented_with_its_default() {
    let text = std::fs::read_to_string(template()).expect("the template");
    let table: toml::Table = toml::from_str(&text).expect("the template parses");
    let command = Overrides::augment_args(clap::Command::new("test"));
    for argument in command.get_arguments() {
        let flag = argument.get_long().expect("a flag");
        let variable = argument.get_env().and_then(|name| name.to_str()).expect("a variable");
        assert_eq!(variable, format!("PF_REGISTRY_{}", flag.replace('-', "_").to_uppercase()));
        let default = match table.get(flag).unwrap_or_else(|| panic!("{flag} is not in the template")) {
            toml::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let help = argument.get_help().expect("help").to_string();
        let default = if default.is_empty() { "none" } else { &default };
        assert!(flag == "data" || help.contains(&format!("[default: {default}]")), "--{flag}: {help:?} does not say {default}");
    }
    Flags::command().debug_assert();
}

#[test]
fn callers_on_this_machine_or_trusted_ones_choose_their_traces() {
    let here = Config::default();
    assert!(here.listen.ip().is_loopback() && here.continues_traces());
    let anywhere = Config { listen: ([0, 0, 0, 0], 5077).into(), ..here.clone() };
    for reachable in [anywhere, Config { proxies: 1, ..here.clone() }, Config { behind_proxy: true, ..here }] {
        assert!(!reachable.continues_traces(), "{reachable:?}");
        assert!(Config { trust_traces: true, ..reachable }.continues_traces());
    }
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("settings.toml");
    std::fs::write(&file, "data = \"/file\"\nmax-requests = 7\nlease-seconds = 9\n").expect("a file");
    let given = Overrides { max_requests: Some(5), ..Overrides::default() };
    let config = Config::load(Some(&file), given).expect("settings");
    assert_eq!((config.data, config.max_requests, config.lease_seconds, config.max_digests), ("/file".into(), 5, 9, 100_000));
}

#[test]
fn what_cannot_be_right_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("settings.toml");
    std::fs::write(&file, "max_requests = 7\n").expect("a file");
    let error = Config::load(Some(&file), Overrides::default()).expect_err("an unknown key").to_string();
    assert!(error.contains("max_requests") && error.contains("settings.toml"), "{error}");
    let missing = Config::load(Some(&dir.path().join("none")), Overrides::default());
    assert!(matches!(missing, Err(SettingsError::File(FileError::Read { .. }))));
    let data = Some(PathBuf::from("/data"));
    let exposed = Overrides { data: data.clone(), listen: Some(([0, 0, 0, 0], 1).into()), ..Overrides::default() };
    assert!(matches!(Config::load(None, exposed.clone()), Err(SettingsError::Exposed(_))));
    assert!(Config::load(None, Overrides { insecure_listen_anywhere: Some(true), ..exposed.clone() }).is_ok());
    assert!(Config::load(None, Overrides { require_tokens: Some(true), behind_proxy: Some(true), ..exposed }).is_ok());
    let zero = Overrides { data: data.clone(), lease_seconds: Some(0), ..Overrides::default() };
    assert!(matches!(Config::load(None, zero), Err(SettingsError::Zero("lease-seconds"))));
    // Digests as many as clients are told to send must fit into a request.
    let tiny = Overrides { data, max_json_bytes: Some(10), ..Overrides::default() };
    let error = Config::load(None, tiny.clone()).expect_err("a tiny limit").to_string();
    assert!(error.contains("max-json-bytes is 10; the least is 13865536"), "{error}");
    assert!(Config::load(None, Overrides { max_json_bytes: Some(13_865_536), ..tiny.clone() }).is_ok());
    let fewer = Overrides { max_digests: Some(1000), max_json_bytes: Some(1 << 20), ..tiny };
    assert!(Config::load(None, fewer).is_ok());
    assert!(matches!(Config::load(None, Overrides::default()), Err(SettingsError::NoData)));
    for wrong in ["a:80", "http://a", "a b"] {
        assert!(toml::from_str::<Overrides>(&format!("host-names = {wrong:?}")).is_err(), "{wrong}");
    }
}

#[test]
fn a_size_has_a_unit_or_none_by_flag_and_in_the_file() {
    use clap::Parser as _;
    let flags = |size: &str| Flags::try_parse_from(["x", "--caller-bytes-per-second", size, "--max-json-bytes", size]);
    for (text, bytes) in [("2MiB", 2 << 20), ("1.5 GB", 1_500_000_000), ("1048576", 1 << 20), ("0", 0)] {
        let given = flags(text).unwrap_or_else(|error| panic!("{text}: {error}")).overrides;
        assert_eq!((given.caller_bytes_per_second, given.max_json_bytes), (Some(bytes), usize::try_from(bytes).ok()), "{text}");
        let file: Overrides = toml::from_str(&format!("caller-bytes-per-second = {text:?}\nmax-json-bytes = {bytes}")).expect("a file");
        assert_eq!(file, given, "{text}");
    }
    assert!(flags("many").is_err_and(|error| error.to_string().contains("expected a size such as 50GiB")));
    let slow = Overrides { data: Some("/data".into()), caller_bytes_per_second: Some(4096), ..Overrides::default() };
    let error = Config::load(None, slow).expect_err("too slow").to_string();
    assert!(error.contains("caller-bytes-per-second is 4.00 KiB; the least is 1.00 MiB"), "{error}");
}

#[test]
fn data_is_needed_where_database_or_storage_is_not_given() {
    let database = || Some("postgres://u:pw@h/d".parse().expect("anything is"));
    let storage = || Some("s3://bucket".to_owned());
    let load = |given| Config::load(None, given);
    assert!(matches!(load(Overrides { database: database(), ..Overrides::default() }), Err(SettingsError::NoData)));
    assert!(matches!(load(Overrides { storage: storage(), ..Overrides::default() }), Err(SettingsError::NoData)));
    assert!(load(Overrides { database: database(), storage: storage(), ..Overrides::default() }).is_ok());
    let data = Some(PathBuf::from("/data"));
    assert!(load(Overrides { data: data.clone(), storage: storage(), ..Overrides::default() }).is_ok());
    let mysql = Overrides { data: data.clone(), database: Some("mysql://u:pw@h/d".parse().expect("anything is")), ..Overrides::default() };
    assert!(matches!(load(mysql), Err(SettingsError::Database)));
    let nowhere = Overrides { data, redirect_downloads: Some(true), ..Overrides::default() };
    assert!(matches!(load(nowhere), Err(SettingsError::NothingToRedirectTo)));
}

#[test]
fn the_password_of_a_database_is_not_printed() {
    let url = "postgres://user:hush@host/db".parse().expect("anything is");
    let config = Config { database: url, ..Config::default() };
    assert!(!format!("{config:?}").contains("hush"), "{config:?}");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("settings.toml");
    std::fs::write(&file, "data = \"/d\"\ndatabse = \"postgres://u:hush@h/d\"\n").expect("a file");
    let error = Config::load(Some(&file), Overrides::default()).expect_err("an unknown key").to_string();
    assert!(error.contains("line 2") && error.contains("databse") && !error.contains("hush"), "{error}");
    let help = Overrides::augment_args(clap::Command::new("test")).render_long_help().to_string();
    let database = Overrides::augment_args(clap::Command::new("test"));
    let database = database.get_arguments().find(|a| a.get_long() == Some("database")).expect("the flag");
    assert!(help.contains("PF_REGISTRY_DATABASE") && database.is_hide_env_values_set(), "--help shows the environment's value");
}
