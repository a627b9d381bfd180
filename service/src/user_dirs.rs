//! The folders of the user, as the XDG base directory specification has them.

use std::path::PathBuf;

/// The folders that the environment names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserDirs {
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `XDG_CONFIG_HOME`.
    pub config_home: Option<PathBuf>,
    /// `XDG_DATA_HOME`.
    pub data_home: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
}

impl UserDirs {
    /// The folders of this process's user. Relative paths are ignored, as the specification asks.
    #[must_use]
    pub fn of_process() -> Self {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        Self {
            home: absolute("HOME"),
            config_home: absolute("XDG_CONFIG_HOME"),
            data_home: absolute("XDG_DATA_HOME"),
            runtime: absolute("XDG_RUNTIME_DIR"),
        }
    }

    /// Configuration: `XDG_CONFIG_HOME`, else `~/.config`.
    #[must_use]
    pub fn config(&self) -> Option<PathBuf> {
        self.config_home.clone().or_else(|| Some(self.home.as_ref()?.join(".config")))
    }

    /// Data: `XDG_DATA_HOME`, else `~/.local/share`.
    #[must_use]
    pub fn data(&self) -> Option<PathBuf> {
        self.data_home.clone().or_else(|| Some(self.home.as_ref()?.join(".local/share")))
    }
}
