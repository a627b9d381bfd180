//! The agent's configuration: a TOML file, then `PF_AGENT_*`, then flags.

use std::path::PathBuf;

/// The agent's configuration. `pf-agent.toml` in the agent's folder is the annotated template.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the local store, push queue and sockets.
    pub data: PathBuf,
    /// Registry for references without a host.
    pub registry: Option<String>,
    /// Bytes of host memory that pages in flight may take. Default 256 MiB.
    pub ring_bytes: u64,
    /// Seconds that an engine may take to answer a call. Default 30.
    pub engine_timeout: std::time::Duration,
}

impl Config {
    /// Where the local store lies.
    #[must_use]
    pub fn store_dir(&self) -> PathBuf {
        self.data.join("store")
    }
}
