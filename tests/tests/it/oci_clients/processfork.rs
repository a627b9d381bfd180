//! The requests that ProcessFork 1.0.15 makes of an `oci://` address, made here one by one: its
//! program would have to be compiled, with 300 crates.
//!
//! An image is a manifest of ProcessFork's own, which it sends as the configuration, and blobs. It
//! sends the configuration first, a signature, and each blob, compressed, as a layer of its own: K
//! and V of each page, too. For each it asks whether the repository has it, begins an upload, and
//! sends it all at once. The manifest with the tag comes last.

use super::token;
use pfr_schema::{Digest, media_type};
use pfr_tests::{Registry, Shape};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};

const IMAGE: &str = "application/vnd.processfork.image.v1+json";
const SIGNATURE: &str = "application/vnd.processfork.signature.v1+json";
const LAYER: &str = "application/vnd.processfork.layer.v1+zstd";
/// The annotation of a layer: its place in a folder of ProcessFork.
const PLACE: &str = "org.processfork.path";

/// An image of ProcessFork.
#[derive(Debug, PartialEq)]
struct Image {
    document: Vec<u8>,
    /// All that it reaches, in the order in which it is sent.
    blobs: Vec<Vec<u8>>,
}

/// An image after a turn of the agent, with these pages.
fn image(turn: &str, pages: &[u64]) -> Image {
    let file = b"print('hello')\n".to_vec();
    let tree = json!({"kind": "fs.tree.v1", "entries": [{"path": "main.py", "kind": "file", "blob": Digest::sha256(&file)}]});
    let message = json!({"role": "user", "content": turn});
    let mut blobs = vec![
        b"the model".to_vec(),
        br#"{"kind":"model.diff.v1","adapters":[]}"#.to_vec(),
        Shape::TINY.flat(pages).to_bytes(),
        tree.to_string().into_bytes(),
        br#"{"kind":"env.v1","vars":{}}"#.to_vec(),
        br#"{"kind":"procs.v1","procs":[]}"#.to_vec(),
        br#"{"kind":"effects.ledger.v1"}"#.to_vec(),
        message.to_string().into_bytes(),
    ];
    let of = |at: usize| Digest::sha256(&blobs[at]);
    let document = json!({
        "schema_version": 1, "media_type": IMAGE,
        "agent": {"kind": "vllm", "version": "0.11", "fingerprint": "test"},
        "model": {"base": of(0), "diff": of(1)}, "cache": {"layout": "paged-batchinvariant-v1", "manifest": of(2)},
        "world": {"fs": of(3), "env": of(4), "procs": of(5)}, "effects": {"ledger": of(6)}, "trace": {"messages": of(7)},
        "created_at": "2026-05-05T10:00:00Z", "parents": []
    });
    blobs.push(file);
    blobs.extend(pages.iter().flat_map(|page| [2 * page, 2 * page + 1]).map(|number| Shape::TINY.page(number)));
    Image { document: document.to_string().into_bytes(), blobs }
}

/// The annotation of the layer with this blob.
fn place(raw: &[u8]) -> String {
    let hex = Digest::sha256(raw).hex();
    format!("blobs/sha256/{}/{hex}.zst", &hex[..2])
}

/// Its client, for the repository `team/sessions`.
struct ProcessFork {
    client: Client,
    base: String,
    token: Option<String>,
    uploads: AtomicUsize,
}

impl ProcessFork {
    fn of(registry: &Registry) -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = Client::builder().user_agent("processfork/1.0.15").build().unwrap();
        Self { client, base: registry.url(), token: None, uploads: AtomicUsize::new(0) }
    }

    fn at(&self, what: &str) -> String {
        format!("{}/v2/team/sessions/{what}", self.base)
    }

    async fn send(&self, request: RequestBuilder) -> Response {
        let request = match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        request.send().await.unwrap()
    }

    /// Sends a blob if the repository lacks it; its descriptor.
    async fn blob(&self, media_type: &str, bytes: &[u8], place: Option<&str>) -> Value {
        let digest = Digest::sha256(bytes);
        let known = self.send(self.client.head(self.at(&format!("blobs/{digest}")))).await;
        if !known.status().is_success() {
            let begun = self.send(self.client.post(self.at("blobs/uploads/"))).await;
            assert_eq!(begun.status(), StatusCode::ACCEPTED, "it goes on after no other answer");
            let location = begun.headers()["location"].to_str().unwrap();
            let address = if location.starts_with("http") { location.to_owned() } else { format!("{}{location}", self.base) };
            let mark = if address.contains('?') { '&' } else { '?' };
            let put = self.client.put(format!("{address}{mark}digest={digest}")).header("content-type", "application/octet-stream");
            let done = self.send(put.body(bytes.to_vec())).await;
            assert!(done.status().is_success(), "{done:?}");
            self.uploads.fetch_add(1, Ordering::Relaxed);
        }
        let mut descriptor = json!({"mediaType": media_type, "size": bytes.len(), "digest": digest});
        if let Some(place) = place {
            descriptor["annotations"] = json!({ PLACE: place });
        }
        descriptor
    }

    /// Sends the manifest; its bytes.
    async fn manifest(&self, tag: &str, config: &Value, layers: &[Value]) -> Vec<u8> {
        let manifest = json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": config, "layers": layers});
        let bytes = manifest.to_string().into_bytes();
        let put = self.client.put(self.at(&format!("manifests/{tag}"))).header("content-type", media_type::OCI_MANIFEST);
        let done = self.send(put.body(bytes.clone())).await;
        let (status, text) = (done.status(), done.text().await.unwrap());
        assert_eq!(status, StatusCode::CREATED, "{text}");
        bytes
    }

    /// Pushes an image; the number of blobs that were sent.
    async fn push(&self, tag: &str, image: &Image) -> usize {
        let config = self.blob(IMAGE, &image.document, None).await;
        let hex = Digest::sha256(&image.document).hex();
        let signature = json!({"algorithm": "hmac-sha256", "manifest_digest": hex, "signature": "5f".repeat(32)});
        let mut layers = vec![self.blob(SIGNATURE, signature.to_string().as_bytes(), Some("manifest.json.sig")).await];
        for raw in &image.blobs {
            let packed = zstd::encode_all(&raw[..], 19).unwrap();
            layers.push(self.blob(LAYER, &packed, Some(&place(raw))).await);
        }
        self.manifest(tag, &config, &layers).await;
        self.uploads.swap(0, Ordering::Relaxed)
    }

    async fn has(&self, tag: &str) -> bool {
        let asked = self.client.head(self.at(&format!("manifests/{tag}"))).header("accept", media_type::OCI_MANIFEST);
        self.send(asked).await.status().is_success()
    }

    async fn fetch_manifest(&self, tag: &str) -> Vec<u8> {
        let asked = self.client.get(self.at(&format!("manifests/{tag}"))).header("accept", media_type::OCI_MANIFEST);
        let answer = self.send(asked).await;
        assert_eq!(answer.status(), StatusCode::OK, "{answer:?}");
        answer.bytes().await.unwrap().to_vec()
    }

    async fn fetch(&self, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap();
        let answer = self.send(self.client.get(self.at(&format!("blobs/{digest}")))).await;
        assert_eq!(answer.status(), StatusCode::OK, "{answer:?}");
        let bytes = answer.bytes().await.unwrap().to_vec();
        assert_eq!(Digest::sha256(&bytes).to_string(), digest);
        bytes
    }

    /// Pulls an image, and checks all that ProcessFork checks but the key of the signature.
    async fn pull(&self, tag: &str) -> Image {
        let manifest: Value = serde_json::from_slice(&self.fetch_manifest(tag).await).unwrap();
        let document = self.fetch(&manifest["config"]).await;
        let (mut blobs, mut signatures) = (Vec::new(), 0);
        for layer in manifest["layers"].as_array().unwrap() {
            let bytes = self.fetch(layer).await;
            if layer["mediaType"] == SIGNATURE {
                let signature: Value = serde_json::from_slice(&bytes).unwrap();
                assert_eq!(signature["manifest_digest"], Digest::sha256(&document).hex());
                signatures += 1;
            } else {
                let raw = zstd::decode_all(&bytes[..]).unwrap();
                assert_eq!(layer["annotations"][PLACE], place(&raw));
                blobs.push(raw);
            }
        }
        assert_eq!(signatures, 1, "{manifest}");
        Image { document, blobs }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processfork_pushes_an_image_and_a_fork_of_it_and_pulls_both() {
    let mut registry = Registry::start();
    let processfork = ProcessFork::of(&registry);
    let (first, fork) = (image("one", &[1, 2, 3]), image("two", &[1, 2, 3, 4]));
    assert_eq!(processfork.push("latest", &first).await, 2 + first.blobs.len(), "configuration, signature, blobs");
    // The page manifest, the messages, and K and V of one page are new.
    assert_eq!(processfork.push("fork", &fork).await, 2 + 4);
    assert_eq!(processfork.push("latest", &first).await, 0, "all of it was there");
    assert!(processfork.has("fork").await && !processfork.has("none").await);

    let collected = processfork.client.post(format!("{}/v1/gc", registry.url())).json(&json!({})).send().await.unwrap();
    assert!(collected.status().is_success(), "{collected:?}");
    registry.restart();
    let processfork = ProcessFork::of(&registry);
    assert_eq!((processfork.pull("latest").await, processfork.pull("fork").await), (first, fork));
    let metrics = registry.metrics();
    assert!(!metrics.contains(r#"status="cut""#) && !metrics.contains(r#"status="5"#), "{metrics}");
}

/// A session of 96,000 tokens in pages of 16 has 12,000 blobs of pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_of_processfork_may_list_as_many_layers_as_its_manifest_has_room_for() {
    let registry = Registry::start();
    let processfork = ProcessFork::of(&registry);
    let config = processfork.blob(IMAGE, b"{}", None).await;
    let raw = Shape::TINY.page(1);
    let layer = processfork.blob(LAYER, &zstd::encode_all(&raw[..], 19).unwrap(), Some(&place(&raw))).await;
    let manifest = processfork.manifest("large", &config, &vec![layer; 12_000]).await;
    assert!(manifest.len() > 3_000_000, "{}", manifest.len());
    assert_eq!(processfork.fetch_manifest("large").await, manifest);
}

/// Its library sends a token. Its program has no option for one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processfork_is_refused_without_a_token_and_pushes_with_one() {
    let registry = Registry::start_with(true, &["--require-tokens"], &[]);
    let mut processfork = ProcessFork::of(&registry);
    let begun = processfork.send(processfork.client.post(processfork.at("blobs/uploads/"))).await;
    assert_eq!(begun.status(), StatusCode::UNAUTHORIZED);
    assert!(begun.text().await.unwrap().contains("an access token is needed"));
    processfork.token = Some(token(&registry, "team/*:pull,push"));
    let image = image("one", &[1]);
    processfork.push("latest", &image).await;
    assert_eq!(processfork.pull("latest").await, image);
}
