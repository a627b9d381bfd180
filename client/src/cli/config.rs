//! The configuration file: a few lines of TOML, unknown fields refused.

use super::failure::Failure;
use serde::Deserialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// Registry used when nothing else names one.
pub const DEFAULT_REGISTRY: &str = "http://127.0.0.1:5077";

/// A bearer token. Never printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Default registry, `http://host:port` or `https://host`.
    pub registry: Option<String>,
    /// Token for that registry, and no other.
    pub token: Option<Secret>,
    /// Directory of the local store.
    pub store: Option<PathBuf>,
    /// Control socket of this host's capture agent.
    pub agent: Option<PathBuf>,
    /// How often a request is tried again.
    pub retries: Option<u32>,
    /// Seconds for which a registry that has answered before is tried again.
    #[serde(rename = "retry-for")]
    pub retry_for: Option<u64>,
    /// Size above which the local store loses what was not used for longest, after a pull.
    #[serde(rename = "max-store-size")]
    pub max_store_size: Option<pfr_client::ByteSize>,
}

impl Config {
    /// Reads the file: `explicit` (from `PF_CONFIG`) must exist, the default place need not.
    pub fn load(explicit: Option<&Path>, environment: &Environment) -> Result<Self, Failure> {
        let default = environment.config_file();
        let Some(path) = explicit.or(default.as_deref()) else { return Ok(Self::default()) };
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).map_err(|e| Failure::usage(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && explicit.is_none() => Ok(Self::default()),
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(Failure::io(&format!("cannot read the configuration {}", path.display()), &e))
            }
            Err(e) => Err(Failure::usage(format!("{}: cannot read the configuration: {e}", path.display()))),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let config: Self = pfr_client::settings::read(text)?;
        match &config.store {
            // No shell is there to expand a ~, and a relative path would be another one in every directory.
            Some(store) if !store.is_absolute() => {
                Err(format!("store: expected an absolute path, found {:?}", store.display().to_string()))
            }
            _ => Ok(config),
        }
    }
}

/// The directories that a login shell gives.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `XDG_CONFIG_HOME`.
    pub config_home: Option<PathBuf>,
    /// `XDG_DATA_HOME`.
    pub data_home: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
}

impl Environment {
    /// Of this process; relative paths are ignored, as the XDG specification asks.
    pub fn of_process() -> Self {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        Self {
            home: absolute("HOME"),
            config_home: absolute("XDG_CONFIG_HOME"),
            data_home: absolute("XDG_DATA_HOME"),
            runtime: absolute("XDG_RUNTIME_DIR"),
        }
    }

    fn config_file(&self) -> Option<PathBuf> {
        let base = self.config_home.clone().or_else(|| Some(self.home.as_ref()?.join(".config")))?;
        Some(base.join("pf/config.toml"))
    }

    /// Where the capture agent listens unless something else says so.
    pub fn agent_socket(&self) -> Option<PathBuf> {
        let runtime = self.runtime.as_ref().map(|dir| dir.join("pf/agent.sock"));
        runtime.or_else(|| Some(self.store_dir()?.join("agent/agent.sock")))
    }

    /// Where the local store is unless something else says so.
    pub fn store_dir(&self) -> Option<PathBuf> {
        let base = self.data_home.clone().or_else(|| Some(self.home.as_ref()?.join(".local/share")))?;
        Some(base.join("pf"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_three_settings_and_hides_the_token() {
        let config = Config::parse("registry = \"http://r:1\"\ntoken = \"hush\"\nstore = \"/s\"\n").unwrap();
        assert_eq!(config.registry.as_deref(), Some("http://r:1"));
        assert_eq!(config.store.as_deref(), Some(Path::new("/s")));
        assert!(!format!("{config:?}").contains("hush"));
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        let error = Config::parse("\nregstry = \"x\"").unwrap_err();
        assert!(error.starts_with("line 2: ") && error.contains("regstry") && error.contains("registry"), "{error}");
    }

    #[test]
    fn no_error_says_a_token() {
        for text in ["tokn = \"hush\"", "token = \"hush", "token = [\"hush\"]", "registry = \"r\"\ntoken = 'hush' x"] {
            let error = Config::parse(text).unwrap_err();
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn the_agent_is_looked_for_where_it_listens() {
        let mut environment = Environment { home: Some("/h".into()), ..Environment::default() };
        assert_eq!(environment.agent_socket(), Some("/h/.local/share/pf/agent/agent.sock".into()));
        environment.runtime = Some("/run/u".into());
        assert_eq!(environment.agent_socket(), Some("/run/u/pf/agent.sock".into()));
    }

    #[test]
    fn a_store_needs_an_absolute_path() {
        assert!(Config::parse("store = \"~/pf\"").unwrap_err().contains("absolute"));
    }

    #[test]
    fn a_named_file_must_exist_and_the_default_one_need_not() {
        let nowhere = Environment { home: Some("/nonexistent".into()), ..Environment::default() };
        assert_eq!(Config::load(None, &nowhere).unwrap(), Config::default());
        assert_eq!(Config::load(Some(Path::new("/nonexistent/x")), &nowhere).unwrap_err().exit(), 1);
    }

    #[test]
    fn xdg_directories_win_over_home() {
        let home = Environment { home: Some("/h".into()), ..Environment::default() };
        assert_eq!(home.config_file(), Some("/h/.config/pf/config.toml".into()));
        assert_eq!(home.store_dir(), Some("/h/.local/share/pf".into()));
        let xdg = Environment { config_home: Some("/c".into()), data_home: Some("/d".into()), ..home };
        assert_eq!(xdg.config_file(), Some("/c/pf/config.toml".into()));
        assert_eq!(xdg.store_dir(), Some("/d/pf".into()));
    }
}
