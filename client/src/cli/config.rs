//! Settings: flags and environment, then the configuration file, a few lines of TOML. Unknown
//! fields are refused.

use super::failure::Failure;
use pfr_schema::codec::Compression;
use pfr_service::{Secret, UserDirs, layered};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The default registry.
pub const DEFAULT_REGISTRY: &str = "http://127.0.0.1:5077";

/// The heading of the options that every command has. Each of them names it: a heading of the whole
/// struct would also be that of the options that a program declares after these.
pub const EVERYWHERE: &str = "Everywhere";

layered! {
    /// Settings as given: by flags and environment, or by the file.
    #[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Deserialize)]
    #[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
    pub struct Overrides {
        /// Registry for references that name none
        #[arg(long, global = true, value_name = "URL", env = "PF_REGISTRY", hide_env_values = true)]
        #[arg(help_heading = EVERYWHERE)]
        pub registry: Option<String>,
        /// Token for the registry of the same source
        #[arg(skip)]
        pub token: Option<Secret>,
        /// Whether tokens may be sent over plain http beyond loopback
        #[arg(skip)]
        pub token_over_http: Option<bool>,
        /// File with certificates (PEM) of authorities to trust, besides those that this machine
        /// trusts
        #[arg(long, global = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath, env = "PF_TLS_CA", hide_env_values = true)]
        #[arg(help_heading = EVERYWHERE)]
        pub tls_ca: Option<PathBuf>,
        /// Directory of the local store
        #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath, env = "PF_STORE", hide_env_values = true)]
        #[arg(help_heading = EVERYWHERE)]
        pub store: Option<PathBuf>,
        /// Control socket of this host's capture agent
        #[arg(skip)]
        pub agent: Option<PathBuf>,
        /// Number of retries of a failed request [default: 5]. If it is given, --retry-for has no
        /// effect
        #[arg(long, global = true, value_name = "N", env = "PF_RETRIES", hide_env_values = true)]
        #[arg(help_heading = EVERYWHERE)]
        pub retries: Option<u32>,
        /// How long this command tries again after it has reached a registry that then goes away,
        /// such as during a restart [default: 120]. If it is given, it counts for a registry that
        /// was never reached, too
        #[arg(long, global = true, value_name = "SECONDS", env = "PF_RETRY_FOR", hide_env_values = true)]
        #[arg(help_heading = EVERYWHERE)]
        pub retry_for: Option<u64>,
        /// Size above which a pull evicts the least recently used snapshots of the local store
        #[arg(skip)]
        pub max_store_size: Option<pfr_client::ByteSize>,
        /// How pages of directories are encoded when they are pushed
        #[arg(skip)]
        pub compression: Option<Compression>,
        /// File with public keys of which one must have signed what is pulled
        #[arg(skip)]
        pub verify_key: Option<PathBuf>,
    }
}

impl Overrides {
    /// Reads the file: `explicit` (from `PF_CONFIG`) must exist, the default place need not.
    pub fn load(explicit: Option<&Path>, dirs: &UserDirs) -> Result<Self, Failure> {
        let default = dirs.config().map(|dir| dir.join("pf/config.toml"));
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
        let config: Self = pfr_service::settings::read(text)?;
        for (name, path) in [("store", &config.store), ("tls-ca", &config.tls_ca), ("verify-key", &config.verify_key)] {
            // No shell expands a ~ in the file, and the meaning of a relative path would depend on
            // the working directory.
            if let Some(path) = path.as_ref().filter(|path| !path.is_absolute()) {
                return Err(format!("{name}: expected an absolute path, found {:?}", path.display().to_string()));
            }
        }
        Ok(config)
    }
}

/// The default directory of the local store.
pub fn store_dir(dirs: &UserDirs) -> Option<PathBuf> {
    Some(dirs.data()?.join("pf"))
}

/// The default control socket of the capture agent.
pub fn agent_socket(dirs: &UserDirs) -> Option<PathBuf> {
    let runtime = dirs.runtime.as_ref().map(|dir| dir.join("pf/agent.sock"));
    runtime.or_else(|| Some(store_dir(dirs)?.join("agent/agent.sock")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_three_settings_and_hides_the_token() {
        let config = Overrides::parse("registry = \"http://r:1\"\ntoken = \"hush\"\nstore = \"/s\"\n").unwrap();
        assert_eq!(config.registry.as_deref(), Some("http://r:1"));
        assert_eq!(config.store.as_deref(), Some(Path::new("/s")));
        assert!(!format!("{config:?}").contains("hush"));
    }

    #[test]
    fn refuses_unknown_settings() {
        let error = Overrides::parse("\nregstry = \"x\"").unwrap_err();
        assert!(error.starts_with("line 2: ") && error.contains("regstry") && error.contains("registry"), "{error}");
    }

    #[test]
    fn no_error_shows_a_token() {
        for text in ["tokn = \"hush\"", "token = \"hush", "token = [\"hush\"]", "registry = \"r\"\ntoken = 'hush' x"] {
            let error = Overrides::parse(text).unwrap_err();
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn the_agent_is_looked_for_where_it_listens() {
        let mut dirs = UserDirs { home: Some("/h".into()), ..UserDirs::default() };
        assert_eq!(agent_socket(&dirs), Some("/h/.local/share/pf/agent/agent.sock".into()));
        dirs.runtime = Some("/run/u".into());
        assert_eq!(agent_socket(&dirs), Some("/run/u/pf/agent.sock".into()));
    }

    #[test]
    fn a_path_is_absolute() {
        for name in ["store", "tls-ca"] {
            let error = Overrides::parse(&format!("{name} = \"~/pf\"")).unwrap_err();
            assert!(error.starts_with(name) && error.contains("absolute"), "{error}");
        }
    }

    #[test]
    fn a_named_file_must_exist_and_the_default_one_need_not() {
        let nowhere = UserDirs { home: Some("/nonexistent".into()), ..UserDirs::default() };
        assert_eq!(Overrides::load(None, &nowhere).unwrap(), Overrides::default());
        assert_eq!(Overrides::load(Some(Path::new("/nonexistent/x")), &nowhere).unwrap_err().exit(), 1);
    }

    #[test]
    fn xdg_directories_win_over_home() {
        let home = UserDirs { home: Some("/h".into()), ..UserDirs::default() };
        assert_eq!(home.config(), Some("/h/.config".into()));
        assert_eq!(store_dir(&home), Some("/h/.local/share/pf".into()));
        let xdg = UserDirs { config_home: Some("/c".into()), data_home: Some("/d".into()), ..home };
        assert_eq!(xdg.config(), Some("/c".into()));
        assert_eq!(store_dir(&xdg), Some("/d/pf".into()));
    }
}
