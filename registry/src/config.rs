//! Settings: declared once, with documentation, unit, default and the name of the environment
//! variable.
//!
//! A flag wins over the environment, the environment over the file, the file over the default. The
//! file denies unknown keys: a misspelt limit must not silently be none.

use crate::http::timeout::Pace;
use pfr_client::{ByteSize, human};
use pfr_schema::FormatError;
use pfr_schema::codec::Codecs;
use pfr_service::settings::{self, FileError, address, address_in_file};
use pfr_service::traces::{TraceError, TraceSettings};
use pfr_service::{LogFormat, Secret, SecretUrl};
use pfr_store::storage::StorageOptions;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The lowest limit on bytes a second: a piece of a stream may have several MiB.
const LEAST_RATE: u64 = 1 << 20;
/// Bytes of the longest digest in a JSON list, SHA-512, and of what a request has besides digests.
const DIGEST_BYTES: usize = 138;
const OTHER_BYTES: usize = 64 << 10;

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr, $env:literal, $value:literal
        $(, $arg:ident = $given:expr)* $(=> $in_file:literal)?;)+) => {
        pfr_service::layered! {
            /// Settings as given: by flags and environment, or by a file.
            #[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Deserialize)]
            #[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
            pub struct Overrides {
                $(
                    $(#[doc = $doc])+
                    #[arg(long, env = $env, value_name = $value $(, $arg = $given)*)]
                    $(#[serde(deserialize_with = $in_file)])?
                    pub $name: Option<$type>,
                )+
            }
        }

        /// Settings of a registry, complete.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl Default for Config {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        impl Overrides {
            /// These settings where given, else the defaults.
            #[must_use]
            pub fn or_default(self) -> Config {
                let defaults = Config::default();
                Config { $($name: self.$name.unwrap_or(defaults.$name),)+ }
            }
        }
    };
}

settings! {
    /// Directory of the store: packs and metadata. Made if it does not exist. Required unless both
    /// --database and --storage are given.
    data: PathBuf = PathBuf::new(), "PF_REGISTRY_DATA", "DIR";
    /// PostgreSQL for the metadata, `postgres://USER:PASSWORD@HOST/DATABASE` [default: none]:
    /// without one, SQLite in --data. Better given by the environment or the file: command lines
    /// can be read by everyone on the machine.
    database: SecretUrl = SecretUrl::default(), "PF_REGISTRY_DATABASE", "URL", hide_env_values = true;
    /// Connections to PostgreSQL, at most [default: 16]. All registries together must stay below
    /// what it allows.
    database_connections: u32 = 16, "PF_REGISTRY_DATABASE_CONNECTIONS", "N";
    /// Where the packs are, `file:///DIR`, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
    /// `az://CONTAINER/PREFIX` [default: none]: without it, in --data. Credentials and endpoint
    /// come from the usual variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL …). Several registries
    /// may share one storage if they share one --database.
    storage: String = String::new(), "PF_REGISTRY_STORAGE", "URL";
    /// How often a request to the storage that failed on its way or with a 5xx is sent again
    /// [default: 4]; 0 for never. Then the client is told `unavailable`.
    storage_retries: u32 = 4, "PF_REGISTRY_STORAGE_RETRIES", "N";
    /// Seconds after the first try within which such a request is sent again [default: 20].
    storage_retry_seconds: u64 = 20, "PF_REGISTRY_STORAGE_RETRY_SECONDS", "S";
    /// File with the key that wraps the keys of encrypted domains: 32 random bytes as base64
    /// [default: none]. Only its owner, and at most its group, may read it. It is read at the
    /// start.
    key_file: PathBuf = PathBuf::new(), "PF_REGISTRY_KEY_FILE", "FILE";
    /// Program that wraps and unwraps the keys of encrypted domains in its place, by a key service
    /// [default: none].
    key_command: PathBuf = PathBuf::new(), "PF_REGISTRY_KEY_COMMAND", "PROGRAM";
    /// Key file that was in use before [default: none]: it opens what `pf-registry domain rewrap`
    /// has not wrapped again yet.
    old_key_file: PathBuf = PathBuf::new(), "PF_REGISTRY_OLD_KEY_FILE", "FILE";
    /// Encrypt new domains, unless the request that makes one says otherwise [default: false]. The
    /// domain `default` is new until it holds something. Needs --key-file or --key-command.
    encrypt_new_domains: bool = false, "PF_REGISTRY_ENCRYPT_NEW_DOMAINS", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Send clients to the storage for large downloads, by URLs that it signs [default: false].
    /// Clients must be able to reach it.
    redirect_downloads: bool = false, "PF_REGISTRY_REDIRECT_DOWNLOADS", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Seconds for which such a URL can be used [default: 900]. Must be less than what collected
    /// packs are kept.
    redirect_seconds: u64 = 900, "PF_REGISTRY_REDIRECT_SECONDS", "S";
    /// Address to listen on [default: 127.0.0.1:5077]. Port 0 takes a free one.
    listen: SocketAddr = (Ipv4Addr::LOCALHOST, 5077).into(), "PF_REGISTRY_LISTEN", "ADDR:PORT", value_parser = address => "address_in_file";
    /// File with the certificate that the registry shows, and after it those that lead to its
    /// authority (PEM) [default: none]. With it and --tls-key the registry speaks https. Both are
    /// read again when they change, and at SIGHUP.
    tls_cert: PathBuf = PathBuf::new(), "PF_REGISTRY_TLS_CERT", "FILE";
    /// File with the private key of that certificate (PEM) [default: none].
    tls_key: PathBuf = PathBuf::new(), "PF_REGISTRY_TLS_KEY", "FILE";
    /// Seconds that a TLS handshake may take [default: 10].
    tls_handshake_seconds: u64 = 10, "PF_REGISTRY_TLS_HANDSHAKE_SECONDS", "S";
    /// File with certificates (PEM) of authorities that other servers may have theirs from, besides
    /// those that this machine trusts [default: none]: upstream, mirror, heal, keys of token
    /// issuers.
    tls_ca: PathBuf = PathBuf::new(), "PF_REGISTRY_TLS_CA", "FILE";
    /// Names of this machine, with commas between them, that requests may address the registry by
    /// besides addresses and `localhost` [default: none]. Only a registry on loopback that requires
    /// no tokens looks at them.
    host_names: HostNames = HostNames::default(), "PF_REGISTRY_HOST_NAMES", "NAMES";
    /// Serve only callers with an access token [default: false]. `pf-registry token create` makes
    /// the first one. Needed to listen on an address that other machines can reach.
    require_tokens: bool = false, "PF_REGISTRY_REQUIRE_TOKENS", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// File with the issuers whose tokens (JWT) are access tokens, too, and what these permit
    /// (TOML) [default: none]. It is read again when it or a file with keys changes, and at SIGHUP.
    token_issuers: PathBuf = PathBuf::new(), "PF_REGISTRY_TOKEN_ISSUERS", "FILE";
    /// Listen in plain http on an address that other machines can reach [default: false]: a proxy
    /// in front of the registry adds TLS, and nothing else reaches this port. Tokens are required
    /// all the same.
    behind_proxy: bool = false, "PF_REGISTRY_BEHIND_PROXY", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Give the metrics to every caller, also where tokens are required [default: false]. They name
    /// the domains. Without it, a scraper needs a token for `*:admin` in all domains.
    open_metrics: bool = false, "PF_REGISTRY_OPEN_METRICS", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Send the tokens for other registries (upstream, mirror, heal) over plain http too [default:
    /// false]: any machine on the way can read them. Loopback is always allowed.
    token_over_http: bool = false, "PF_REGISTRY_TOKEN_OVER_HTTP", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Proxies in front of the registry, each of which adds the address of its client to
    /// `X-Forwarded-For` [default: 0]. They say where requests come from: for the audit log, and
    /// for limits on callers without a token.
    proxies: usize = 0, "PF_REGISTRY_PROXIES", "N";
    /// File that gets a copy of the audit log, as lines of JSON [default: none]. The log itself is
    /// in the database.
    audit_log: PathBuf = PathBuf::new(), "PF_REGISTRY_AUDIT_LOG", "FILE";
    /// Record in the audit log each request that reads, or that prepares a push, too [default:
    /// false].
    audit_reads: bool = false, "PF_REGISTRY_AUDIT_READS", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Days for which the audit log is kept [default: 90].
    audit_days: u64 = 90, "PF_REGISTRY_AUDIT_DAYS", "DAYS";
    /// Records that the audit log of a domain keeps, about [default: 1000000]: the newest.
    audit_rows: u64 = 1_000_000, "PF_REGISTRY_AUDIT_ROWS", "N";
    /// Days for which events are kept [default: 7]: so long a reader may be away and miss none.
    event_days: u64 = 7, "PF_REGISTRY_EVENT_DAYS", "DAYS";
    /// Events that a domain keeps, about [default: 1000000]: the newest.
    event_rows: u64 = 1_000_000, "PF_REGISTRY_EVENT_ROWS", "N";
    /// Requests a second of one caller, on average [default: 0]; 0 for no limit. A caller is the
    /// holder of a token, or the subject of an issuer's; without one, a source address. Beyond it:
    /// 429 with Retry-After. Each replica counts for itself.
    caller_requests_per_second: u64 = 0, "PF_REGISTRY_CALLER_REQUESTS_PER_SECOND", "N";
    /// Bytes of bodies a second that one caller may send, and as many that it may receive, on
    /// average [default: 0]; 0 for no limit. Beyond it, its streams are slowed down.
    caller_bytes_per_second: u64 = 0, "PF_REGISTRY_CALLER_BYTES_PER_SECOND", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// The same for all callers of a domain together [default: 0].
    domain_requests_per_second: u64 = 0, "PF_REGISTRY_DOMAIN_REQUESTS_PER_SECOND", "N";
    /// The same for all callers of a domain together [default: 0].
    domain_bytes_per_second: u64 = 0, "PF_REGISTRY_DOMAIN_BYTES_PER_SECOND", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Seconds' worth of requests and bytes that may come at once after a rest [default: 10].
    burst_seconds: u64 = 10, "PF_REGISTRY_BURST_SECONDS", "S";
    /// Listen on an address that other machines can reach without requiring tokens [default:
    /// false]: any client that reaches the port can read, change and delete everything.
    insecure_listen_anywhere: bool = false, "PF_REGISTRY_INSECURE_LISTEN_ANYWHERE", "BOOL", num_args = 0..=1, default_missing_value = "true";
    /// Requests worked on at once [default: 256], and as many streams of frames. A request that
    /// waits for its client does not count; health and metrics are exempt.
    max_requests: usize = 256, "PF_REGISTRY_MAX_REQUESTS", "N";
    /// Clients that follow events at once [default: 64]. They take no places of requests.
    max_event_streams: usize = 64, "PF_REGISTRY_MAX_EVENT_STREAMS", "N";
    /// How many of them one caller may be at once [default: 16]: the holder of a token, or else a
    /// source address.
    max_event_streams_per_caller: usize = 16, "PF_REGISTRY_MAX_EVENT_STREAMS_PER_CALLER", "N";
    /// Seconds for which a request waits for its turn before it is refused with 503 and Retry-After
    /// [default: 30].
    queue_seconds: u64 = 30, "PF_REGISTRY_QUEUE_SECONDS", "S";
    /// Uploads taken in at full speed at once [default: 6], each with about 20 MiB of memory. One
    /// that waits for its client gives way.
    max_uploads: usize = 6, "PF_REGISTRY_MAX_UPLOADS", "N";
    /// Downloads read ahead at once [default: 6], each with about 12 MiB of memory. Others go on
    /// piece by piece.
    max_downloads: usize = 6, "PF_REGISTRY_MAX_DOWNLOADS", "N";
    /// Bytes that all uploads that wait for their clients may hold together [default: 33554432],
    /// beyond 64 KiB each.
    slow_upload_bytes: u64 = 32 << 20, "PF_REGISTRY_SLOW_UPLOAD_BYTES", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Connections held at once [default: 1024], each with up to 128 KiB of what its client sent.
    /// When a request comes on another one, the one that was idle for longest is closed. Beside
    /// these are 64 that wait with a request, and a reserve of 64 where health checks are answered.
    max_connections: usize = 1024, "PF_REGISTRY_MAX_CONNECTIONS", "N";
    /// Bytes a second that a client must send, or take, of a body [default: 16384], averaged over
    /// the whole body; 0 for no minimum.
    body_bytes_per_second: u64 = 16 << 10, "PF_REGISTRY_BODY_BYTES_PER_SECOND", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Seconds that a client may be behind that rate before it is cut [default: 30].
    body_idle_seconds: u64 = 30, "PF_REGISTRY_BODY_IDLE_SECONDS", "S";
    /// A connection that is idle, or still sending headers, after this many seconds is closed
    /// [default: 60].
    header_seconds: u64 = 60, "PF_REGISTRY_HEADER_SECONDS", "S";
    /// Seconds that a client may take in all to send a JSON body [default: 120].
    json_body_seconds: u64 = 120, "PF_REGISTRY_JSON_BODY_SECONDS", "S";
    /// Bytes of one JSON request body [default: 16777216]. The digests of one request must fit.
    max_json_bytes: usize = 16 << 20, "PF_REGISTRY_MAX_JSON_BYTES", "SIZE", value_parser = size::<usize> => "size_in_file";
    /// Digests in one request [default: 100000].
    max_digests: usize = 100_000, "PF_REGISTRY_MAX_DIGESTS", "N";
    /// Bytes of frames that clients are told to put in one request [default: 67108864]. A single
    /// larger blob is allowed.
    max_frames_bytes: u64 = 64 << 20, "PF_REGISTRY_MAX_FRAMES_BYTES", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Codecs of what is stored from now on, besides raw and zstd: `all`, `none`, or names with
    /// commas between them, such as `bf16-bitmaps,bf16-huffman` [default: all]. What is stored
    /// already stays readable. Needed only where programs of an older version read the same
    /// storage.
    codecs: StoredCodecs = StoredCodecs(Codecs::ALL), "PF_REGISTRY_CODECS", "CODECS";
    /// Seconds for which an unfinished push keeps what it uploaded or asked about [default: 3600].
    /// Each use renews it.
    lease_seconds: u64 = 3600, "PF_REGISTRY_LEASE_SECONDS", "S";
    /// Bytes after which a pack is closed [default: 67108864].
    pack_bytes: u64 = 64 << 20, "PF_REGISTRY_PACK_BYTES", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Bytes that stay free on the disks of packs and metadata [default: 0]: pushes are refused
    /// below that, deletions and collections are not. 0 is 64 MiB, or a twentieth of a smaller
    /// disk.
    min_free_bytes: u64 = 0, "PF_REGISTRY_MIN_FREE_BYTES", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Seconds between collections of garbage, about [default: 300]; 0 for never. Each replica may
    /// run them.
    gc_interval_seconds: u64 = 300, "PF_REGISTRY_GC_INTERVAL_SECONDS", "S";
    /// Seconds for which a pack that nothing points to stays on storage [default: 3600]: longer
    /// than any download.
    gc_grace_seconds: u64 = 3600, "PF_REGISTRY_GC_GRACE_SECONDS", "S";
    /// Seconds between scrubs, which read every pack, about [default: 0]; 0 for never. A scrub by
    /// one replica counts for all.
    scrub_interval_seconds: u64 = 0, "PF_REGISTRY_SCRUB_INTERVAL_SECONDS", "S";
    /// Bytes that such a scrub reads a second, at most [default: 33554432]; 0 for no limit.
    scrub_bytes_per_second: u64 = 32 << 20, "PF_REGISTRY_SCRUB_BYTES_PER_SECOND", "SIZE", value_parser = size::<u64> => "size_in_file";
    /// Seconds between runs of the retention policies, about [default: 3600]; 0 for never. From an
    /// hour on, a run by one replica counts for all.
    retention_interval_seconds: u64 = 3600, "PF_REGISTRY_RETENTION_INTERVAL_SECONDS", "S";
    /// Base URL of the registry that is asked for what is not here; empty for none [default: none].
    upstream: String = String::new(), "PF_REGISTRY_UPSTREAM", "URL";
    /// Seconds for which a tag that came from the upstream is served before it is looked at again
    /// [default: 60].
    upstream_ttl_seconds: u64 = 60, "PF_REGISTRY_UPSTREAM_TTL_SECONDS", "S";
    /// Seconds that requests in flight get to finish at shutdown [default: 30].
    shutdown_grace: u64 = 30, "PF_REGISTRY_SHUTDOWN_GRACE", "S";
    /// Form of the log on standard error [default: text].
    log_format: LogFormat = LogFormat::Text, "PF_REGISTRY_LOG_FORMAT", "FORMAT";
    /// What is logged: a level, or per-module directives such as `info,pfr_store=debug` [default:
    /// info].
    log: String = "info".to_owned(), "PF_REGISTRY_LOG", "FILTER";
    /// Collector that traces are sent to over OTLP/HTTP, `http(s)://HOST:PORT` [default: none].
    /// Like the next two it wins over the standard variable, here OTEL_EXPORTER_OTLP_ENDPOINT.
    otlp_endpoint: String = String::new(), "PF_REGISTRY_OTLP_ENDPOINT", "URL";
    /// Headers of the requests to it, `NAME=VALUE,NAME=VALUE` [default: none]. Better given by the
    /// environment or the file: command lines can be read by everyone on the machine.
    otlp_headers: Secret = Secret::default(), "PF_REGISTRY_OTLP_HEADERS", "HEADERS", hide_env_values = true;
    /// Which spans are sent: a level, or per-module directives such as `pfr_registry=info`
    /// [default: none]. Without it, those of `pf` from `info` on.
    trace_filter: String = String::new(), "PF_REGISTRY_TRACE_FILTER", "FILTER";
    /// Continue the traces of callers also where others than this machine may call [default:
    /// false]: a caller then decides whether its requests are recorded. A registry on loopback
    /// without --proxies and --behind-proxy always does.
    trust_traces: bool = false, "PF_REGISTRY_TRUST_TRACES", "BOOL", num_args = 0..=1, default_missing_value = "true";
}

/// A set of codecs as settings have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct StoredCodecs(pub Codecs);

impl FromStr for StoredCodecs {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for StoredCodecs {
    type Error = FormatError;

    fn try_from(text: String) -> Result<Self, FormatError> {
        text.parse()
    }
}

/// Names of hosts as settings have them, in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct HostNames(pub Vec<String>);

impl FromStr for HostNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let name = |name: &str| match name.bytes().all(is_plain) {
            true => Ok(name.trim_end_matches('.').to_ascii_lowercase()),
            false => Err(format!("expected names of hosts without a port, with commas between them, found {name:?}")),
        };
        names.map(name).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<String> for HostNames {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Why settings were refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The file cannot be read or does not parse.
    #[error(transparent)]
    File(#[from] FileError),
    /// No data directory.
    #[error(
        "no data directory: give --data DIR (or PF_REGISTRY_DATA, or `data` in the settings file), or both --database and --storage, \
         which need none"
    )]
    NoData,
    /// Not a PostgreSQL URL.
    #[error("the database is not a PostgreSQL URL: expected postgres://USER:PASSWORD@HOST/DATABASE")]
    Database,
    /// Redirects without a bucket.
    #[error("redirect-downloads needs a bucket as --storage; clients cannot be sent to a directory")]
    NothingToRedirectTo,
    /// URLs that would outlive what they point to.
    #[error(
        "redirect-seconds must be less than gc-grace-seconds: a client must not be sent to bytes that are gone by the time it reads them"
    )]
    RedirectsOutliveTheirBytes,
    /// A rate at which no stream could be sent.
    #[error(
        "{name} is {}; the least is {}, or 0 for no limit: with less, streams would end by their time limits",
        human::bytes(*found),
        human::bytes(LEAST_RATE)
    )]
    TooSlow {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: u64,
    },
    /// A limit of 0.
    #[error("{0} is 0, which would let nothing through; leave it out for the default")]
    Zero(&'static str),
    /// Requests that clients are told to send would be refused.
    #[error("max-json-bytes is {found}; the least is {least}, for a request with max-digests digests must fit, here {digests}")]
    DigestsDoNotFit {
        /// Bytes of a JSON body that are allowed.
        found: usize,
        /// Bytes that must be allowed.
        least: usize,
        /// Digests of one request that are allowed.
        digests: usize,
    },
    /// An address that other machines can reach.
    #[error(
        "refusing to listen on {0}: other machines could reach it, and no tokens are required, so any client that can connect could read, \
         change and delete every snapshot. Pass --require-tokens, listen on 127.0.0.1, or pass --insecure-listen-anywhere if the network is \
         trusted"
    )]
    Exposed(SocketAddr),
    /// An address that other machines can reach, in plain HTTP.
    #[error(
        "refusing to listen on {0} in plain http: any machine on the way could read tokens and snapshots. Pass --tls-cert and --tls-key, \
         listen on 127.0.0.1, pass --behind-proxy if a proxy in front adds TLS, or --insecure-listen-anywhere if the network is trusted"
    )]
    Plain(SocketAddr),
    /// Two keys that would wrap.
    #[error("key-file and key-command are given: one of them wraps the keys of domains, so leave the other one out")]
    TwoKeys,
    /// Encryption without a key.
    #[error("encrypt-new-domains needs a key that wraps those of domains: give key-file or key-command")]
    NoKey,
    /// One half of a certificate.
    #[error("{0} is given and {1} is not: a certificate and its key belong together")]
    HalfACertificate(&'static str, &'static str),
    /// Issuers of tokens that are not asked for.
    #[error("token-issuers is given and require-tokens is not: a registry that requires no tokens looks at none")]
    TokensNotRequired,
    /// The log filter does not parse.
    #[error("log filter: {0}")]
    Filter(String),
    /// Traces cannot be sent as the settings or the standard variables say.
    #[error(transparent)]
    Traces(#[from] TraceError),
}

/// A setting in bytes, with or without a unit.
fn size<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    in_bytes(text.parse()?)
}

/// Likewise in the settings file, where a number stands for itself.
fn size_in_file<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<Option<T>, D::Error> {
    in_bytes(ByteSize::deserialize(deserializer)?).map(Some).map_err(D::Error::custom)
}

fn in_bytes<T: TryFrom<u64>>(ByteSize(bytes): ByteSize) -> Result<T, String> {
    T::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than this machine can have"))
}

/// An empty path is none.
fn is_given(path: &Path) -> bool {
    !path.as_os_str().is_empty()
}

impl Config {
    /// Settings from the file, if one is named, and from what was given on the command line.
    ///
    /// # Errors
    /// [`SettingsError`] says which setting, and what to do.
    pub fn load(file: Option<&Path>, given: Overrides) -> Result<Self, SettingsError> {
        let config = Self::read(file, given)?;
        config.check()?;
        Ok(config)
    }

    /// The same, unchecked.
    pub(crate) fn read(file: Option<&Path>, given: Overrides) -> Result<Self, SettingsError> {
        let from_file = file.map(settings::file::<Overrides>).transpose()?.unwrap_or_default();
        Ok(given.or(from_file).or_default())
    }

    /// The base URL at which this machine reaches the registry with these settings.
    pub(crate) fn own_url(&self) -> String {
        let ip = match self.listen.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let scheme = if self.has_tls() { "https" } else { "http" };
        format!("{scheme}://{}", SocketAddr::new(ip, self.listen.port()))
    }

    fn check(&self) -> Result<(), SettingsError> {
        if !is_given(&self.data) && (self.database.is_empty() || self.storage.is_empty()) {
            return Err(SettingsError::NoData);
        }
        let postgres = ["postgres://", "postgresql://"].iter().any(|scheme| self.database.expose().starts_with(scheme));
        if !self.database.is_empty() && !postgres {
            return Err(SettingsError::Database);
        }
        if self.redirect_downloads && (self.storage.is_empty() || self.storage.starts_with("file:")) {
            return Err(SettingsError::NothingToRedirectTo);
        }
        if self.redirect_downloads && self.redirect_seconds >= self.gc_grace_seconds {
            return Err(SettingsError::RedirectsOutliveTheirBytes);
        }
        let positive = [
            ("max-requests", self.max_requests as u64),
            ("max-connections", self.max_connections as u64),
            ("body-idle-seconds", self.body_idle_seconds),
            ("json-body-seconds", self.json_body_seconds),
            ("queue-seconds", self.queue_seconds),
            ("max-uploads", self.max_uploads as u64),
            ("max-downloads", self.max_downloads as u64),
            ("slow-upload-bytes", self.slow_upload_bytes),
            ("header-seconds", self.header_seconds),
            ("max-json-bytes", self.max_json_bytes as u64),
            ("max-digests", self.max_digests as u64),
            ("max-frames-bytes", self.max_frames_bytes),
            ("lease-seconds", self.lease_seconds),
            ("pack-bytes", self.pack_bytes),
            ("database-connections", self.database_connections.into()),
            ("redirect-seconds", self.redirect_seconds),
            ("audit-days", self.audit_days),
            ("audit-rows", self.audit_rows),
            ("event-days", self.event_days),
            ("event-rows", self.event_rows),
            ("max-event-streams", self.max_event_streams as u64),
            ("max-event-streams-per-caller", self.max_event_streams_per_caller as u64),
            ("burst-seconds", self.burst_seconds),
            ("tls-handshake-seconds", self.tls_handshake_seconds),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(SettingsError::Zero(name));
        }
        let rates = [("caller-bytes-per-second", self.caller_bytes_per_second), ("domain-bytes-per-second", self.domain_bytes_per_second)];
        if let Some((name, found)) = rates.into_iter().find(|(_, rate)| (1..LEAST_RATE).contains(rate)) {
            return Err(SettingsError::TooSlow { name, found });
        }
        let (found, digests) = (self.max_json_bytes, self.max_digests);
        let least = digests.saturating_mul(DIGEST_BYTES).saturating_add(OTHER_BYTES);
        if found < least {
            return Err(SettingsError::DigestsDoNotFit { found, least, digests });
        }
        match (is_given(&self.key_file), is_given(&self.key_command)) {
            (true, true) => return Err(SettingsError::TwoKeys),
            (false, false) if self.encrypt_new_domains => return Err(SettingsError::NoKey),
            _ => {}
        }
        match (is_given(&self.tls_cert), is_given(&self.tls_key)) {
            (true, false) => return Err(SettingsError::HalfACertificate("tls-cert", "tls-key")),
            (false, true) => return Err(SettingsError::HalfACertificate("tls-key", "tls-cert")),
            _ => {}
        }
        if is_given(&self.token_issuers) && !self.require_tokens {
            return Err(SettingsError::TokensNotRequired);
        }
        if !self.listen.ip().is_loopback() && !self.insecure_listen_anywhere {
            if !self.require_tokens {
                return Err(SettingsError::Exposed(self.listen));
            }
            if !self.has_tls() && !self.behind_proxy {
                return Err(SettingsError::Plain(self.listen));
            }
        }
        Ok(())
    }

    /// Whether it speaks https.
    pub(crate) fn has_tls(&self) -> bool {
        is_given(&self.tls_cert)
    }

    /// What is trusted besides the authorities that this machine trusts.
    pub(crate) fn extra_roots(&self) -> Option<PathBuf> {
        is_given(&self.tls_ca).then(|| self.tls_ca.clone())
    }

    /// Where traces go.
    pub(crate) fn trace_settings(&self) -> TraceSettings {
        TraceSettings { endpoint: self.otlp_endpoint.clone(), headers: self.otlp_headers.clone(), filter: self.trace_filter.clone() }
    }

    /// Whether requests are steps of their callers' traces: a caller that is not trusted must not
    /// decide what is recorded.
    #[must_use]
    pub fn continues_traces(&self) -> bool {
        self.trust_traces || (self.listen.ip().is_loopback() && self.proxies == 0 && !self.behind_proxy)
    }

    /// The settings of the store.
    #[must_use]
    pub fn store_options(&self) -> pfr_store::Options {
        pfr_store::Options {
            lease: Duration::from_secs(self.lease_seconds),
            pack_bytes: self.pack_bytes,
            min_free: (self.min_free_bytes > 0).then_some(self.min_free_bytes),
            ingests: self.max_uploads,
            outputs: self.max_downloads,
            slow_bytes: self.slow_upload_bytes,
            codecs: self.codecs.0,
            queue: Duration::from_secs(self.queue_seconds),
            ..Default::default()
        }
    }

    /// What opens encrypted domains.
    pub(crate) fn key_options(&self) -> pfr_store::KeyOptions {
        let path = |path: &PathBuf| is_given(path).then(|| path.clone());
        pfr_store::KeyOptions {
            key_file: path(&self.key_file),
            key_command: path(&self.key_command),
            old_key_file: path(&self.old_key_file),
            encrypt_new: self.encrypt_new_domains,
            ..pfr_store::KeyOptions::default()
        }
    }

    /// How to talk to the storage, with credentials from this process's environment.
    #[must_use]
    pub fn storage_options(&self) -> StorageOptions {
        StorageOptions {
            retries: usize::try_from(self.storage_retries).unwrap_or(usize::MAX),
            retry_for: Duration::from_secs(self.storage_retry_seconds),
            ..StorageOptions::from_env()
        }
    }

    /// How slow a client may be.
    pub(crate) fn pace(&self) -> Pace {
        Pace { grace: Duration::from_secs(self.body_idle_seconds), rate: self.body_bytes_per_second }
    }
}
