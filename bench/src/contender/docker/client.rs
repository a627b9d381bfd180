//! A plain client of the OCI distribution protocol: one request for each blob, several at a time.

use crate::Result;
use crate::workload::{Blob, Snapshot};
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_TYPE, LOCATION};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Maximum layers of one manifest: a registry accepts at most 4 MiB.
const LAYERS: usize = 10_000;

/// What has moved so far.
#[derive(Clone, Copy)]
pub struct Moved {
    /// Bytes of bodies.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
}

/// The client.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    http: reqwest::Client,
    repository: String,
    connections: usize,
    bytes: AtomicU64,
    requests: AtomicU64,
}

impl Client {
    /// A client of the registry at `url`.
    pub fn new(url: &str, connections: usize) -> Result<Self> {
        let http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).pool_max_idle_per_host(connections).build()?;
        let repository = format!("{url}/v2/bench/w");
        Ok(Self(Arc::new(Inner { http, repository, connections, bytes: AtomicU64::new(0), requests: AtomicU64::new(0) })))
    }

    /// What it has moved.
    pub fn moved(&self) -> Moved {
        Moved { bytes: self.0.bytes.load(Ordering::Relaxed), requests: self.0.requests.load(Ordering::Relaxed) }
    }

    /// Uploads what is not there, then the manifest (several if one cannot list all).
    pub async fn push(&self, snapshot: &Snapshot, tag: &str) -> Result<()> {
        let config = snapshot.dir.join("page_manifest.json");
        let bytes = std::fs::read(&config)?;
        let config = Blob { path: config, digest: Sha256::digest(&bytes).into(), len: bytes.len() };
        let blobs: Arc<Vec<Blob>> = Arc::new(snapshot.blobs.iter().chain([&config]).cloned().collect());
        self.each(blobs, |inner, blob| async move { inner.push_blob(&blob).await }).await?;
        for (number, layers) in snapshot.blobs.chunks(LAYERS).enumerate() {
            let layers: Vec<_> =
                layers.iter().map(|b| serde_json::json!({"mediaType": LAYER, "digest": b.name(), "size": b.len})).collect();
            let config =
                serde_json::json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config.name(), "size": config.len});
            let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
            let url = format!("{}/manifests/{tag}-{number}", self.0.repository);
            let request = self.0.http.put(url).header(CONTENT_TYPE, MANIFEST).body(serde_json::to_vec(&manifest)?);
            expect(self.0.send(request).await?, StatusCode::CREATED)?;
        }
        Ok(())
    }

    /// Fetches what `tag` lists into `dir`, which appears when it is complete and durable.
    pub async fn pull(&self, tag: &str, dir: &Path) -> Result<()> {
        let partial = dir.with_extension("partial");
        std::fs::create_dir_all(&partial)?;
        for number in 0.. {
            let request = self.0.http.get(format!("{}/manifests/{tag}-{number}", self.0.repository)).header(ACCEPT, MANIFEST);
            let response = self.0.send(request).await?;
            if number > 0 && response.status() == StatusCode::NOT_FOUND {
                break;
            }
            let manifest: serde_json::Value = response.error_for_status()?.json().await?;
            let layers = manifest["layers"].as_array().ok_or("a manifest without layers")?;
            let digests: Vec<String> = layers.iter().filter_map(|layer| layer["digest"].as_str().map(str::to_owned)).collect();
            let partial = Arc::new(partial.clone());
            self.each(Arc::new(digests), move |inner, digest| {
                let partial = Arc::clone(&partial);
                async move { inner.pull_blob(&digest, &partial).await }
            })
            .await?;
        }
        rustix::fs::syncfs(File::open(&partial)?)?;
        std::fs::rename(&partial, dir)?;
        Ok(File::open(dir.parent().ok_or("no parent")?)?.sync_all()?)
    }

    /// Runs `work` on every item, as many at a time as there are connections.
    async fn each<T, W, F>(&self, items: Arc<Vec<T>>, work: W) -> Result<()>
    where
        T: Clone + Send + Sync + 'static,
        W: Fn(Arc<Inner>, T) -> F + Clone + Send + 'static,
        F: Future<Output = Result<()>> + Send,
    {
        let next = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..self.0.connections {
            let (inner, items, next, work) = (Arc::clone(&self.0), Arc::clone(&items), Arc::clone(&next), work.clone());
            tasks.spawn(async move {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(Arc::clone(&inner), item.clone()).await?;
                }
                Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done?.map_err(|e: Box<dyn std::error::Error + Send + Sync>| e)?;
        }
        Ok(())
    }
}

impl Inner {
    async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(request.send().await?)
    }

    async fn push_blob(&self, blob: &Blob) -> Result<()> {
        let head = self.send(self.http.head(format!("{}/blobs/{}", self.repository, blob.name()))).await?;
        if head.status().is_success() {
            return Ok(());
        }
        let started = expect(self.send(self.http.post(format!("{}/blobs/uploads/", self.repository))).await?, StatusCode::ACCEPTED)?;
        let location = started.headers().get(LOCATION).and_then(|v| v.to_str().ok()).ok_or("an upload without a location")?;
        let mut url = started.url().join(location)?;
        url.query_pairs_mut().append_pair("digest", &blob.name());
        self.bytes.fetch_add(blob.len as u64, Ordering::Relaxed);
        // The file is in the page cache, so this takes far less than a millisecond and needs no
        // other thread.
        let body = std::fs::read(&blob.path)?;
        expect(self.send(self.http.put(url).header(CONTENT_TYPE, "application/octet-stream").body(body)).await?, StatusCode::CREATED)?;
        Ok(())
    }

    async fn pull_blob(&self, digest: &str, dir: &Path) -> Result<()> {
        let mut response = self.send(self.http.get(format!("{}/blobs/{digest}", self.repository))).await?.error_for_status()?;
        let hex = digest.strip_prefix("sha256:").ok_or("a digest that is not sha256")?;
        let (mut file, mut hasher) = (File::create_new(dir.join(hex))?, Sha256::new());
        while let Some(bytes) = response.chunk().await? {
            self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            hasher.update(&bytes);
            file.write_all(&bytes)?;
        }
        if hex::encode(hasher.finalize()) != hex {
            return Err(format!("{digest} came damaged").into());
        }
        Ok(())
    }
}

fn expect(response: reqwest::Response, status: StatusCode) -> Result<reqwest::Response> {
    if response.status() == status { Ok(response) } else { Err(format!("{}: {}", response.url().path(), response.status()).into()) }
}
