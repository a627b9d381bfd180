//! Storage of packs: opens object stores by URL, and checks what they can do.
//!
//! | URL | where | credentials from |
//! |---|---|---|
//! | `file:///dir` | a directory, with fsync; shared by replicas if the file system is | |
//! | `s3://bucket/prefix` | S3 and what speaks it | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`, web identity, container, instance |
//! | `gs://bucket/prefix` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, `GOOGLE_APPLICATION_CREDENTIALS`, instance |
//! | `az://container/prefix` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, … |
//!
//! A registry needs only that an object that was put can be read. Keys are unique, so neither
//! conditional writes nor listing are needed. Summaries of the journal list its folder, for what a
//! killed process left there, and a rebuild lists everything. [`Storage::probe`] says what holds,
//! for the operator.

mod credentials;

use crate::boxed;
use crate::error::{Error, Result};
use crate::packs::{PROBES, in_directory};
use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::signer::{Method, Signer, Url};
use object_store::{BackoffConfig, ClientConfigKey, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, RetryConfig};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Age in seconds after which a probe object counts as left behind by a killed start.
const LEFT_BEHIND: i64 = 3600;

/// Settings of the connection to an object store.
#[derive(Clone)]
pub struct StorageOptions {
    /// Variables with credentials and endpoints, as of the environment. Not shown by `Debug`.
    pub environment: Vec<(String, String)>,
    /// Limit on making a connection. Default 5 s.
    pub connect_timeout: Duration,
    /// Limit on one request, its body included: at most 8 MiB. Default 60 s.
    pub request_timeout: Duration,
    /// How often a request that failed on the way or with a 5xx is sent again. Default 4.
    pub retries: usize,
    /// Time after which it is not sent again: the caller is waiting, and may itself try again.
    /// Default 20 s.
    pub retry_for: Duration,
}

impl Default for StorageOptions {
    fn default() -> Self {
        Self {
            environment: Vec::new(),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(60),
            retries: 4,
            retry_for: Duration::from_secs(20),
        }
    }
}

impl StorageOptions {
    /// The defaults, with this process's environment.
    #[must_use]
    pub fn from_env() -> Self {
        let text = |os: std::ffi::OsString| os.into_string().ok();
        let environment = std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?))).collect();
        Self { environment, ..Self::default() }
    }

    /// Variables that begin with `prefix` and mean something to the object store. Time limits from
    /// the environment come later, and win.
    fn settings<K: FromStr>(&self, prefix: &str, client: fn(ClientConfigKey) -> K) -> Vec<(K, String)> {
        let seconds = |d: Duration| format!("{} ms", d.as_millis());
        let ours = [(ClientConfigKey::ConnectTimeout, self.connect_timeout), (ClientConfigKey::Timeout, self.request_timeout)];
        let theirs = self.environment.iter().filter(|(name, _)| name.starts_with(prefix));
        let theirs = theirs.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())));
        ours.into_iter().map(|(key, limit)| (client(key), seconds(limit))).chain(theirs).collect()
    }

    fn retry(&self) -> RetryConfig {
        RetryConfig { backoff: BackoffConfig::default(), max_retries: self.retries, retry_timeout: self.retry_for }
    }
}

impl fmt::Debug for StorageOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorageOptions")
            .field("environment", &"…")
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("retries", &self.retries)
            .field("retry_for", &self.retry_for)
            .finish()
    }
}

/// An object store, and what besides reading and writing it can do. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Storage {
    url: String,
    packs: Arc<dyn ObjectStore>,
    prefix: Path,
    signer: Option<Arc<dyn Signer>>,
    dir: Option<std::path::PathBuf>,
    /// The metadata service of a cloud host that credentials come from, if they come from there.
    metadata_service: Option<String>,
}

/// What an object store can do, by trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Written objects can be listed. Needed to rebuild metadata from packs; nothing else lists.
    pub list: bool,
    /// Objects can be deleted. Needed to free space.
    pub delete: bool,
    /// A write that must create does not replace an existing object. Nothing depends on it.
    pub create_if_absent: bool,
}

/// The object store behind `url`. Nothing is asked of it yet.
///
/// # Errors
/// [`Error::Invalid`] for a URL that is none of these, or credentials that cannot be;
/// [`Error::Unavailable`] for a directory that cannot be made.
pub fn open(url: &str, options: &StorageOptions) -> Result<(Arc<dyn ObjectStore>, Storage)> {
    // A process can set it only once. Any provider will do, so an earlier one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // The message does not repeat the URL, which may have a secret in the wrong place.
    let expected = "expected file:///DIR, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX as storage";
    let parsed = Url::parse(url).map_err(|e| Error::Invalid(format!("{expected}: {e}")))?;
    if !parsed.username().is_empty() || parsed.password().is_some() || parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(Error::Invalid(format!("{expected}, without user, query or fragment; credentials come from the environment")));
    }
    let prefix = Path::from_url_path(parsed.path()).map_err(|e| Error::Invalid(format!("{expected}: {e}")))?;
    let refused = |e: object_store::Error| Error::Invalid(format!("{}: {e}", bucket(&parsed)));
    let named = parsed.host_str().is_some_and(|host| !host.is_empty());
    match parsed.scheme() {
        "file" if !named => {
            let dir = parsed.to_file_path().map_err(|()| Error::Invalid("expected an absolute path in file:///DIR".into()))?;
            open_dir(&dir)
        }
        "s3" if named => {
            let settings = options.settings("AWS_", AmazonS3ConfigKey::Client);
            let builder = settings.into_iter().fold(AmazonS3Builder::new(), |b, (key, value)| b.with_config(key, value));
            let metadata_service = credentials::metadata_service(url, &builder, &options.environment)?;
            let store = builder.with_url(bucket(&parsed)).with_retry(options.retry()).build().map_err(refused)?;
            let (packs, storage) = prefixed(url, Arc::new(store), prefix);
            Ok((packs, Storage { metadata_service, ..storage }))
        }
        "gs" if named => {
            let settings = options.settings("GOOGLE_", GoogleConfigKey::Client);
            let builder = settings.into_iter().fold(GoogleCloudStorageBuilder::new(), |b, (key, value)| b.with_config(key, value));
            let store = builder.with_url(bucket(&parsed)).with_retry(options.retry()).build().map_err(refused)?;
            Ok(prefixed(url, Arc::new(store), prefix))
        }
        "az" if named => {
            let settings = options.settings("AZURE_", AzureConfigKey::Client);
            let builder = settings.into_iter().fold(MicrosoftAzureBuilder::new(), |b, (key, value)| b.with_config(key, value));
            let store = builder.with_url(bucket(&parsed)).with_retry(options.retry()).build().map_err(refused)?;
            Ok(prefixed(url, Arc::new(store), prefix))
        }
        _ => Err(Error::Invalid(expected.to_owned())),
    }
}

/// The URL without its prefix.
fn bucket(url: &Url) -> String {
    format!("{}://{}", url.scheme(), url.host_str().unwrap_or_default())
}

/// Makes a directory, durably, where it is not there.
///
/// # Errors
/// [`Error::of_dir`].
pub fn make_dir(dir: &std::path::Path) -> Result<()> {
    pfr_service::durable::create_dir_all(dir).map_err(|e| Error::of_dir(dir, &e))
}

/// Packs in a directory, with fsync. It is made if it is not there.
///
/// # Errors
/// [`Error::of_dir`] for a directory that cannot be made.
pub fn open_dir(dir: &std::path::Path) -> Result<(Arc<dyn ObjectStore>, Storage)> {
    make_dir(dir)?;
    let packs = in_directory(dir).map_err(Error::packs)?;
    let url = Url::from_file_path(dir).map_or_else(|()| dir.display().to_string(), String::from);
    let storage = Storage {
        url,
        packs: Arc::clone(&packs),
        prefix: Path::default(),
        signer: None,
        dir: Some(dir.to_owned()),
        metadata_service: None,
    };
    Ok((packs, storage))
}

fn prefixed<S: ObjectStore + Signer>(url: &str, store: Arc<S>, prefix: Path) -> (Arc<dyn ObjectStore>, Storage) {
    let signer: Arc<dyn Signer> = Arc::clone(&store) as _;
    let packs: Arc<dyn ObjectStore> = if prefix.is_root() { store } else { Arc::new(PrefixStore::new(store, prefix.clone())) };
    let storage =
        Storage { url: url.to_owned(), packs: Arc::clone(&packs), prefix, signer: Some(signer), dir: None, metadata_service: None };
    (packs, storage)
}

impl Storage {
    /// Its URL, which holds no secret.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its directory, if it is one: for [`crate::Store::with_packs_dir`].
    #[must_use]
    pub fn dir(&self) -> Option<&std::path::Path> {
        self.dir.as_deref()
    }

    /// Whether it can give out URLs for reading.
    #[must_use]
    pub fn can_sign(&self) -> bool {
        self.signer.is_some()
    }

    /// A URL under which any client can read the object at `path` for so long.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot sign, [`Error::Unavailable`] if its credentials cannot be
    /// had.
    #[boxed]
    pub async fn signed_url(&self, path: &str, expires: Duration) -> Result<String> {
        let signer = self.signer.as_ref().ok_or_else(|| Error::Invalid(format!("{} has no signed URLs", self.url)))?;
        let whole = self.prefix.parts().chain(Path::from(path).parts()).collect::<Path>();
        Ok(signer.signed_url(Method::GET, &whole, expires).await.map_err(Error::packs)?.into())
    }

    /// Checks that something answers where credentials must come from. Without this the first
    /// request fails after many seconds, and its error names the address of a metadata service.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are no credentials for it.
    #[boxed]
    pub async fn check_credentials(&self) -> Result<()> {
        match &self.metadata_service {
            Some(service) => credentials::must_answer(&self.url, service).await,
            None => Ok(()),
        }
    }

    /// Tries what a registry does: write, read back, list, replace, delete one small object of its
    /// own.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if writing or reading back fails: then it is of no use.
    /// [`Error::Invalid`] if there are no credentials for it.
    #[boxed]
    pub async fn probe(&self) -> Result<Probe> {
        let Some(service) = &self.metadata_service else { return self.try_all().await };
        self.check_credentials().await?;
        self.try_all().await.map_err(|error| match error {
            Error::Unavailable { what, reason } => Error::Unavailable { what, reason: format!("{reason}; {}", credentials::hint(service)) },
            other => other,
        })
    }

    async fn try_all(&self) -> Result<Probe> {
        let folder = Path::from(PROBES);
        let path = folder.clone().join(uuid::Uuid::now_v7().to_string());
        let bytes = Bytes::from_static(b"pf: can this be read back?");
        self.packs.put(&path, bytes.clone().into()).await.map_err(Error::packs)?;
        let read = self.packs.get(&path).await.map_err(Error::packs)?.bytes().await.map_err(Error::packs)?;
        if read != bytes {
            return Err(Error::Unavailable { what: "packs", reason: format!("{}: it reads other bytes than were written", self.url) });
        }
        let listed: std::result::Result<Vec<ObjectMeta>, _> = self.packs.list(Some(&folder)).try_collect().await;
        let listed = listed.unwrap_or_default();
        let own = listed.iter().find(|object| object.location == path);
        let list = own.is_some();
        let create = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let again = self.packs.put_opts(&path, "replaced".into(), create).await;
        let create_if_absent = matches!(again, Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }));
        let delete = self.packs.delete(&path).await.is_ok();
        // Objects left behind by processes that were killed while they started. Their age is
        // measured by the storage's clock: other processes may be starting now.
        let left =
            |object: &&ObjectMeta| own.is_some_and(|own| own.last_modified.timestamp() - object.last_modified.timestamp() > LEFT_BEHIND);
        for object in listed.iter().filter(left) {
            if let Err(error) = self.packs.delete(&object.location).await {
                tracing::debug!(%error, object = %object.location, "removing an old probe object failed");
            }
        }
        Ok(Probe { list, delete, create_if_absent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(environment: &[(&str, &str)]) -> StorageOptions {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        StorageOptions { environment, ..StorageOptions::default() }
    }

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "a-key"), ("AWS_SECRET_ACCESS_KEY", "hush-hush")];

    #[test]
    fn what_is_no_storage_is_refused_without_repeating_it() {
        for url in ["", "bucket", "s3:///x", "s3://", "http://h/b", "memory:///", "s3://hush:hush-hush@bucket", "s3://b?key=hush-hush"] {
            let error = open(url, &s3(&KEYS)).unwrap_err();
            assert_eq!(error.code(), pfr_schema::ErrorCode::InvalidRequest, "{url}: {error}");
            assert!(!error.to_string().contains("hush-hush"), "{error}");
        }
    }

    #[tokio::test]
    async fn objects_lie_under_the_prefix_and_signed_urls_point_there() {
        let options = s3(&[KEYS[0], KEYS[1], ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_ALLOW_HTTP", "true")]);
        let (_, storage) = open("s3://bucket/a/b%20c", &options).unwrap();
        let signed = storage.signed_url("ff/key.pfpack", Duration::from_secs(900)).await.unwrap();
        assert!(signed.starts_with("http://127.0.0.1:1/bucket/a/b%20c/ff/key.pfpack?"), "{signed}");
        assert!(signed.contains("X-Amz-Expires=900") && !signed.contains("hush-hush"), "{signed}");
    }

    #[test]
    fn secrets_are_not_printed() {
        let options = s3(&KEYS);
        let (packs, storage) = open("s3://bucket", &options).unwrap();
        let printed = format!("{options:?} {storage:?} {packs:?} {packs}");
        assert!(!printed.contains("hush-hush"), "{printed}");
    }

    #[tokio::test]
    async fn a_directory_does_all_that_is_asked_but_sign() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file://{}", dir.path().join("new/packs").display());
        let (_, storage) = open(&url, &StorageOptions::default()).unwrap();
        assert!(!storage.can_sign());
        assert_eq!(storage.probe().await.unwrap(), Probe { list: true, delete: true, create_if_absent: true });
    }

    #[tokio::test]
    async fn a_start_removes_what_killed_starts_left_behind_and_nothing_of_starts_under_way() {
        let dir = tempfile::tempdir().unwrap();
        let (_, storage) = open(&format!("file://{}", dir.path().display()), &StorageOptions::default()).unwrap();
        let (old, new) = (dir.path().join(PROBES).join("old"), dir.path().join(PROBES).join("new"));
        std::fs::create_dir(dir.path().join(PROBES)).unwrap();
        for file in [&old, &new] {
            std::fs::write(file, "left").unwrap();
        }
        let long_ago = old.metadata().unwrap().modified().unwrap() - Duration::from_secs(2 * 3600);
        std::fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
        storage.probe().await.unwrap();
        assert!(!old.exists() && new.exists());
    }

    #[tokio::test]
    async fn a_bucket_that_is_not_there_is_unavailable_soon() {
        let environment = [KEYS[0], KEYS[1], ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_ALLOW_HTTP", "true")];
        let options = StorageOptions { retries: 1, ..s3(&environment) };
        let (_, storage) = open("s3://bucket/p", &options).unwrap();
        let error = storage.probe().await.unwrap_err();
        assert_eq!(error.code(), pfr_schema::ErrorCode::Unavailable);
        assert!(!error.to_string().contains("hush-hush"), "{error}");
    }
}
