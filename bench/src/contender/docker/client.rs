//! A plain client of the OCI distribution protocol: one request for each blob, several at a time.

use crate::Result;
use crate::contender::http::{Http, Moved, expect, publish};
use crate::workload::{Blob, Snapshot};
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_TYPE, LOCATION};
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::sync::Arc;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Maximum layers of one manifest: a registry accepts at most 4 MiB.
const LAYERS: usize = 10_000;

/// The client.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    http: Http,
    repository: String,
}

impl Client {
    /// A client of the registry at `url`.
    pub fn new(url: &str, connections: usize) -> Result<Self> {
        Ok(Self(Arc::new(Inner { http: Http::new(connections)?, repository: format!("{url}/v2/bench/w") })))
    }

    /// What it has moved.
    pub fn moved(&self) -> Moved {
        self.0.http.moved()
    }

    /// Uploads what is not there, then the manifest (several if one cannot list all).
    pub async fn push(&self, snapshot: &Snapshot, tag: &str) -> Result<()> {
        let config = snapshot.dir.join("page_manifest.json");
        let bytes = std::fs::read(&config)?;
        let config = Blob { path: config, digest: Sha256::digest(&bytes).into(), len: bytes.len() };
        let (http, inner) = (&self.0.http, Arc::clone(&self.0));
        let push = move |blob: Blob| {
            let inner = Arc::clone(&inner);
            async move { inner.push_blob(&blob).await }
        };
        http.each(snapshot.blobs.iter().chain([&config]).cloned().collect(), push).await?;
        for (number, layers) in snapshot.blobs.chunks(LAYERS).enumerate() {
            let layers: Vec<_> =
                layers.iter().map(|b| serde_json::json!({"mediaType": LAYER, "digest": b.name(), "size": b.len})).collect();
            let config =
                serde_json::json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config.name(), "size": config.len});
            let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
            let url = format!("{}/manifests/{tag}-{number}", self.0.repository);
            let request = http.client.put(url).header(CONTENT_TYPE, MANIFEST).body(serde_json::to_vec(&manifest)?);
            expect(http.send(request).await?, StatusCode::CREATED)?;
        }
        Ok(())
    }

    /// Fetches what `tag` lists into `dir`, which appears when it is complete and durable.
    pub async fn pull(&self, tag: &str, dir: &Path) -> Result<()> {
        let partial = dir.with_extension("partial");
        std::fs::create_dir_all(&partial)?;
        let (http, into) = (&self.0.http, Arc::new(partial.clone()));
        for number in 0.. {
            let request = http.client.get(format!("{}/manifests/{tag}-{number}", self.0.repository)).header(ACCEPT, MANIFEST);
            let response = http.send(request).await?;
            if number > 0 && response.status() == StatusCode::NOT_FOUND {
                break;
            }
            let manifest: serde_json::Value = response.error_for_status()?.json().await?;
            let layers = manifest["layers"].as_array().ok_or("a manifest without layers")?;
            let digests: Vec<String> = layers.iter().filter_map(|layer| layer["digest"].as_str().map(str::to_owned)).collect();
            let (inner, into) = (Arc::clone(&self.0), Arc::clone(&into));
            let pull = move |digest: String| {
                let (inner, into) = (Arc::clone(&inner), Arc::clone(&into));
                async move { inner.pull_blob(&digest, &into).await }
            };
            http.each(digests, pull).await?;
        }
        publish(&partial, dir)
    }
}

impl Inner {
    async fn push_blob(&self, blob: &Blob) -> Result<()> {
        let http = &self.http;
        let head = http.send(http.client.head(format!("{}/blobs/{}", self.repository, blob.name()))).await?;
        if head.status().is_success() {
            return Ok(());
        }
        let started = expect(http.send(http.client.post(format!("{}/blobs/uploads/", self.repository))).await?, StatusCode::ACCEPTED)?;
        let location = started.headers().get(LOCATION).and_then(|v| v.to_str().ok()).ok_or("an upload without a location")?;
        let mut url = started.url().join(location)?;
        url.query_pairs_mut().append_pair("digest", &blob.name());
        expect(http.put(url, blob).await?, StatusCode::CREATED)?;
        Ok(())
    }

    async fn pull_blob(&self, digest: &str, dir: &Path) -> Result<()> {
        let hex = digest.strip_prefix("sha256:").ok_or("a digest that is not sha256")?;
        self.http.save(&format!("{}/blobs/{digest}", self.repository), hex, dir).await
    }
}
