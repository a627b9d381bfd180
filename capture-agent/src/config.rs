//! The agent's configuration: a TOML file, then `PF_AGENT_*`, then flags. The file denies unknown
//! keys: a misspelt setting must not silently be none.

use crate::error::{Error, Result};
use crate::llama::settings::LlamaServer;
use pfr_client::{ByteSize, Remote, RemoteOptions, StoredTokens, registry_url, same_server};
use pfr_schema::AgentName;
use pfr_schema::api::AgentReport;
use pfr_schema::codec::Compression;
use pfr_service::settings::{self, FileError};
use pfr_service::{LogFormat, Secret, UserDirs, layered};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Least size of the ring: a page of an engine must fit into it, and is rarely smaller.
const LEAST_RING: u64 = 64 << 10;

/// The agent's configuration. `pf-agent.toml` in the agent's folder is the annotated template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Folder of the local store, push queue and sockets.
    pub data: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// The socket for engines.
    pub engine_socket: PathBuf,
    /// Registry for references without a host.
    pub registry: Option<String>,
    /// File with certificates of authorities that registries may have theirs from, besides those
    /// that this machine trusts. Default: none.
    pub tls_ca: Option<PathBuf>,
    /// File with public keys of which one must have signed what is pulled. Default: none.
    pub verify_key: Option<PathBuf>,
    /// Token for that registry, and no other: a reference to a stranger must not hand it out.
    pub token: Option<Secret>,
    /// File that has this token. It is read again for each use: tokens of issuers are renewed.
    pub token_file: Option<PathBuf>,
    /// Tokens that `pf login` stored for the agent's user. Default: none.
    pub stored_tokens: StoredTokens,
    /// Whether tokens may be sent over plain http beyond loopback. Default: no.
    pub token_over_http: bool,
    /// Bytes of host memory that pages in flight may take. Default 256 MiB.
    pub ring_bytes: u64,
    /// Bytes of host memory for pages that restores have asked a registry for. Default 256 MiB.
    pub restore_bytes: u64,
    /// Time that an engine may take to answer a call. Default 30 s.
    pub engine_timeout: Duration,
    /// Time that an engine may stay paused; then it goes on by itself and the capture fails.
    /// Default 60 s.
    pub pause_limit: Duration,
    /// Wait after the first failed try of a push; doubles with each. Default 1 s.
    pub push_retry: Duration,
    /// Longest wait between two tries of a push. Default 5 min.
    pub push_retry_max: Duration,
    /// Longest time between two reports to the registry; zero: it gets none. Default 30 s.
    pub report_interval: Duration,
    /// Name under which the agent reports. Default: that of the host.
    pub report_name: Option<AgentName>,
    /// Loopback address for `/metrics` over TCP, besides the control socket.
    pub metrics_listen: Option<SocketAddr>,
    /// Time that captures, restores and saves under way get to finish at the end. Default 30 s.
    pub shutdown_grace: Duration,
    /// Size above which the local store loses what was not used for longest. Default: none.
    pub max_store_size: Option<ByteSize>,
    /// How captured pages and state tensors are encoded. Default: `hot` where the processor has
    /// vector instructions for it, else `off`.
    pub compression: Compression,
    /// Servers of llama.cpp whose slots are captured. Default: none.
    pub llama: Vec<LlamaServer>,
    /// Form of the log on standard error.
    pub log_format: LogFormat,
    /// What is logged: a level, or per-module directives. Default `info`.
    pub log: String,
}

layered! {
/// Settings as given: by flags and environment, or by a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Overrides {
    /// Folder of the local store, push queue and sockets [default: $XDG_DATA_HOME/pf/agent or
    /// ~/.local/share/pf/agent].
    #[arg(long, env = "PF_AGENT_DATA", value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Control socket [default: $XDG_RUNTIME_DIR/pf/agent.sock, else agent.sock in the data
    /// folder].
    #[arg(long, env = "PF_AGENT_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Socket for engines [default: engines.sock beside the control socket].
    #[arg(long, env = "PF_AGENT_ENGINE_SOCKET", value_name = "PATH")]
    pub engine_socket: Option<PathBuf>,
    /// Registry for references without a host: `http(s)://host[:port][/domains/NAME]`.
    #[arg(long, env = "PF_AGENT_REGISTRY", value_name = "URL")]
    pub registry: Option<String>,
    /// File with certificates (PEM) of authorities that registries may have theirs from, besides
    /// those that this machine trusts [default: none].
    #[arg(long, env = "PF_AGENT_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// File with public keys (PEM): restores and warms fetch only snapshots that one of them has
    /// signed [default: none].
    #[arg(long, env = "PF_AGENT_VERIFY_KEY", value_name = "FILE")]
    pub verify_key: Option<PathBuf>,
    /// Token for that registry; by file or `PF_AGENT_TOKEN`, since everybody sees flags.
    #[arg(skip)]
    pub token: Option<Secret>,
    /// File with the token, instead; read again for each use.
    #[arg(long, env = "PF_AGENT_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Send tokens over plain http to other machines too [default: false]. Any machine on the way
    /// can read them.
    #[arg(long, env = "PF_AGENT_TOKEN_OVER_HTTP", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub token_over_http: Option<bool>,
    /// Bytes of host memory that pages in flight may take, at least 65536 [default: 268435456]. A
    /// page must fit.
    #[arg(long, env = "PF_AGENT_RING_BYTES", value_name = "SIZE")]
    pub ring_bytes: Option<ByteSize>,
    /// Bytes of host memory for pages that restores have asked a registry for and not yet handed to
    /// the engine and the local store, of all restores together, at least 65536 [default:
    /// 268435456]. Half of it is for the pages as they come.
    #[arg(long, env = "PF_AGENT_RESTORE_BYTES", value_name = "SIZE")]
    pub restore_bytes: Option<ByteSize>,
    /// Seconds that an engine may take to answer a call [default: 30].
    #[arg(long, env = "PF_AGENT_ENGINE_TIMEOUT", value_name = "S")]
    pub engine_timeout: Option<u64>,
    /// Seconds that an engine may stay paused; then it goes on by itself and the capture fails
    /// [default: 60].
    #[arg(long, env = "PF_AGENT_PAUSE_LIMIT", value_name = "S")]
    pub pause_limit: Option<u64>,
    /// Milliseconds to wait after the first failed try of a push; doubles with each [default:
    /// 1000].
    #[arg(long, env = "PF_AGENT_PUSH_RETRY_MS", value_name = "MS")]
    pub push_retry_ms: Option<u64>,
    /// Seconds to wait at most between two tries of a push [default: 300].
    #[arg(long, env = "PF_AGENT_PUSH_RETRY_MAX", value_name = "S")]
    pub push_retry_max: Option<u64>,
    /// Seconds between two reports to the registry, at most 3600 [default: 30]. The registry shows
    /// its operators the engines of this host, its drains and warms. 0: it gets no reports.
    #[arg(long, env = "PF_AGENT_REPORT_INTERVAL", value_name = "S")]
    pub report_interval: Option<u64>,
    /// Name under which this agent reports [default: the name of the host].
    #[arg(long, env = "PF_AGENT_REPORT_NAME", value_name = "NAME")]
    pub report_name: Option<AgentName>,
    /// Loopback address for /metrics over TCP, besides the control socket [default: none].
    #[arg(long, env = "PF_AGENT_METRICS_LISTEN", value_name = "ADDR:PORT", value_parser = settings::address)]
    #[serde(deserialize_with = "settings::address_in_file")]
    pub metrics_listen: Option<SocketAddr>,
    /// Seconds that captures, restores and saves under way get to finish at the end [default: 30].
    #[arg(long, env = "PF_AGENT_SHUTDOWN_GRACE", value_name = "S")]
    pub shutdown_grace: Option<u64>,
    /// Size above which the local store loses what was not used for longest, such as 500GiB
    /// [default: none].
    #[arg(long, env = "PF_AGENT_MAX_STORE_SIZE", value_name = "SIZE")]
    pub max_store_size: Option<ByteSize>,
    /// How captured pages and state tensors are encoded: `hot`, fast; `cold`, smaller; `off`
    /// [default: hot, or off where the processor has no vector instructions for it].
    #[arg(long, env = "PF_AGENT_COMPRESSION", value_name = "HOW")]
    pub compression: Option<Compression>,
    /// A llama-server whose slots are captured, as `name=NAME,url=URL,slot-save-path=DIR`; may be
    /// given several times [default: none].
    #[arg(long, env = "PF_AGENT_LLAMA", value_name = "SERVER", value_delimiter = ';')]
    pub llama: Option<Vec<LlamaServer>>,
    /// Form of the log on standard error [default: text].
    #[arg(long, env = "PF_AGENT_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// What is logged: a level, or per-module directives such as `info,pfr_agent=debug` [default:
    /// info].
    #[arg(long, env = "PF_AGENT_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}
}

impl Overrides {
    /// These settings, and those of a file where none are given.
    fn over(self, path: &Path) -> Result<Self> {
        let mut file: Self = settings::file(path).map_err(|error| match error {
            FileError::Read { path, source } => Error::io(format!("settings file {}", path.display()))(source),
            error => Error::Invalid(error.to_string()),
        })?;
        // A flag that names a token file replaces a token in the settings file.
        if self.token.is_some() || self.token_file.is_some() {
            (file.token, file.token_file) = (None, None);
        }
        Ok(self.or(file))
    }

    fn check_token(&self) -> Result<()> {
        match (&self.token, &self.token_file) {
            (Some(_), Some(_)) => Err(Error::Invalid("token and token-file are both given; give one".into())),
            (Some(token), None) if token.is_empty() => Err(Error::Invalid("the token is empty".into())),
            (None, Some(path)) => token_of(path).map(drop),
            _ => Ok(()),
        }
    }
}

/// The token in a file.
fn token_of(path: &Path) -> Result<Secret> {
    let text = std::fs::read_to_string(path).map_err(Error::io(format!("token file {}", path.display())))?;
    let token = Secret::new(text.trim());
    if token.is_empty() { Err(Error::Invalid(format!("the token in {} is empty", path.display()))) } else { Ok(token) }
}

impl Config {
    /// Everything below `data`, no registry, defaults.
    #[must_use]
    pub fn new(data: impl Into<PathBuf>) -> Self {
        let data = data.into();
        Self {
            socket: data.join("agent.sock"),
            engine_socket: data.join("engines.sock"),
            data,
            registry: None,
            tls_ca: None,
            verify_key: None,
            token: None,
            token_file: None,
            stored_tokens: StoredTokens::default(),
            token_over_http: false,
            ring_bytes: 256 << 20,
            restore_bytes: 256 << 20,
            engine_timeout: Duration::from_secs(30),
            pause_limit: Duration::from_secs(60),
            push_retry: Duration::from_secs(1),
            push_retry_max: Duration::from_secs(300),
            report_interval: Duration::from_secs(30),
            report_name: None,
            metrics_listen: None,
            shutdown_grace: Duration::from_secs(30),
            max_store_size: None,
            compression: Compression::default(),
            llama: Vec::new(),
            log_format: LogFormat::Text,
            log: "info".into(),
        }
    }

    /// Settings from the file, if one is named, and from what was given on the command line.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Io`]: which setting, and what to do.
    pub fn load(file: Option<&Path>, given: Overrides, dirs: &UserDirs) -> Result<Self> {
        let given = match file {
            Some(file) => given.over(file)?,
            None => given,
        };
        given.check_token()?;
        let no_data = || Error::Invalid("no data folder: give --data DIR (there is no home directory to put it in)".into());
        let data = given.data.or_else(|| Some(dirs.data()?.join("pf/agent"))).ok_or_else(no_data)?;
        let mut config = Self::new(data);
        let runtime = dirs.runtime.as_ref().map(|dir| dir.join("pf/agent.sock"));
        config.socket = given.socket.or(runtime).unwrap_or(config.socket);
        config.engine_socket = given.engine_socket.unwrap_or_else(|| config.socket.with_file_name("engines.sock"));
        config.registry = given.registry.filter(|r| !r.is_empty()).map(|r| registry_url(&r).unwrap_or(r));
        config.tls_ca = given.tls_ca.filter(|path| !path.as_os_str().is_empty());
        config.verify_key = given.verify_key.filter(|path| !path.as_os_str().is_empty());
        config.token = given.token;
        config.token_file = given.token_file;
        config.stored_tokens = StoredTokens::of(dirs);
        config.token_over_http = given.token_over_http.unwrap_or(false);
        config.ring_bytes = given.ring_bytes.map_or(config.ring_bytes, |size| size.0);
        config.restore_bytes = given.restore_bytes.map_or(config.restore_bytes, |size| size.0);
        config.engine_timeout = given.engine_timeout.map_or(config.engine_timeout, Duration::from_secs);
        config.pause_limit = given.pause_limit.map_or(config.pause_limit, Duration::from_secs);
        config.push_retry = given.push_retry_ms.map_or(config.push_retry, Duration::from_millis);
        config.push_retry_max = given.push_retry_max.map_or(config.push_retry_max, Duration::from_secs);
        config.report_interval = given.report_interval.map_or(config.report_interval, Duration::from_secs);
        config.report_name = given.report_name;
        config.metrics_listen = given.metrics_listen;
        config.shutdown_grace = given.shutdown_grace.map_or(config.shutdown_grace, Duration::from_secs);
        config.max_store_size = given.max_store_size;
        config.compression = given.compression.unwrap_or_default();
        config.llama = given.llama.unwrap_or_default();
        config.log_format = given.log_format.unwrap_or_default();
        config.log = given.log.unwrap_or(config.log);
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        if self.ring_bytes < LEAST_RING {
            let found = self.ring_bytes;
            return Err(Error::Invalid(format!("ring-bytes is {found}; the least is {LEAST_RING}, for a page of an engine must fit")));
        }
        if self.restore_bytes < LEAST_RING {
            let found = self.restore_bytes;
            return Err(Error::Invalid(format!("restore-bytes is {found}; the least is {LEAST_RING}")));
        }
        let zero = [
            ("engine-timeout", self.engine_timeout.is_zero()),
            ("pause-limit", self.pause_limit.is_zero()),
            ("push-retry-ms", self.push_retry.is_zero()),
            ("push-retry-max", self.push_retry_max.is_zero()),
            // The store would keep nothing: 0 is how other settings say "no limit".
            ("max-store-size", self.max_store_size.is_some_and(|size| size.0 == 0)),
        ];
        if let Some((name, _)) = zero.iter().find(|(_, is_zero)| *is_zero) {
            return Err(Error::Invalid(format!("{name} is 0; leave it out for the default")));
        }
        if self.report_interval.as_secs() > AgentReport::LONGEST_INTERVAL {
            let (found, most) = (self.report_interval.as_secs(), AgentReport::LONGEST_INTERVAL);
            return Err(Error::Invalid(format!("report-interval is {found}; the most is {most}, and 0 sends no reports")));
        }
        if let Some(address) = self.metrics_listen.filter(|address| !address.ip().is_loopback()) {
            return Err(Error::Invalid(format!("metrics-listen {address}: only a loopback address; a scraper elsewhere needs a proxy")));
        }
        if self.socket == self.engine_socket {
            return Err(Error::Invalid(format!("socket and engine-socket are both {}", self.socket.display())));
        }
        if let Some(registry) = &self.registry {
            self.remote(registry)?;
        }
        let mut names = std::collections::HashSet::new();
        for server in &self.llama {
            server.check().map_err(Error::Invalid)?;
            if !names.insert(&server.name) {
                return Err(Error::Invalid(format!("llama: two servers are called {:?}", server.name)));
            }
        }
        Ok(())
    }

    /// Where the local store lies.
    #[must_use]
    pub fn store_dir(&self) -> PathBuf {
        self.data.join("store")
    }

    /// Where pushes wait.
    #[must_use]
    pub fn pushes_dir(&self) -> PathBuf {
        self.data.join("pushes")
    }

    /// Where jobs are remembered.
    #[must_use]
    pub fn jobs_dir(&self) -> PathBuf {
        self.data.join("jobs")
    }

    /// Where it is remembered which snapshots are kept, and until when.
    #[must_use]
    pub fn kept_dir(&self) -> PathBuf {
        self.data.join("kept")
    }

    /// A registry, with the token that belongs to it: the configured one if the registry is the
    /// agent's own, else the one that was stored by a login.
    ///
    /// # Errors
    /// [`Error::Client`] if it is no base URL, or if a token would be sent where others can read
    /// it. [`Error::Token`] if the file with the token, or with the stored tokens, cannot be read.
    pub fn remote(&self, registry: &str) -> Result<Remote> {
        let token = self.token_for(registry).map_err(|error| Error::Token(Box::new(error)))?;
        let (token_over_http, retry_for, extra_roots) = (self.token_over_http, Duration::ZERO, self.tls_ca.clone());
        Ok(Remote::new(registry, RemoteOptions { token, token_over_http, extra_roots, retries: 2, retry_for, ..RemoteOptions::default() })?)
    }

    /// The same, for pulls: if the configuration names keys, one must have signed what is pulled.
    ///
    /// # Errors
    /// Those of [`Config::remote`]; [`Error::Client`] if the file with the keys cannot be read.
    pub fn remote_to_pull_from(&self, registry: &str) -> Result<Remote> {
        let remote = self.remote(registry)?;
        Ok(match &self.verify_key {
            Some(path) => remote.verifying(pfr_client::public_keys(path)?),
            None => remote,
        })
    }

    fn token_for(&self, registry: &str) -> Result<Option<Secret>> {
        let own = self.registry.as_deref().is_some_and(|own| same_server(own, registry));
        Ok(match (&self.token, &self.token_file) {
            (Some(token), _) if own => Some(token.clone()),
            (None, Some(file)) if own => Some(token_of(file)?),
            _ => self.stored_tokens.token_for(registry)?,
        })
    }
}
