//! Collection in a real registry with images: it frees what no image holds, and nothing else.

use pfr_schema::{Digest, media_type};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir};
use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};
use std::time::Duration;

const TEAM: &str = "/v2/team/images";

struct Pusher {
    client: Client,
    url: String,
}

impl Pusher {
    fn of(registry: &Registry) -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        Self { client: Client::new(), url: registry.url() }
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Response {
        self.client.request(method, format!("{}{path}", self.url)).body(body).send().await.unwrap()
    }

    /// Uploads a blob as Docker does: as a stream, and then its digest.
    async fn blob(&self, content: &[u8]) -> Value {
        let digest = Digest::sha256(content);
        let begun = self.send(Method::POST, &format!("{TEAM}/blobs/uploads/"), Vec::new()).await;
        let location = begun.headers()["location"].to_str().unwrap().to_owned();
        assert_eq!(self.send(Method::PATCH, &location, content.to_vec()).await.status(), StatusCode::ACCEPTED);
        let end = self.send(Method::PUT, &format!("{location}?digest={digest}"), Vec::new()).await;
        assert_eq!(end.status(), StatusCode::CREATED);
        json!({"mediaType": "x/layer", "digest": digest, "size": content.len()})
    }

    async fn image(&self, tag: &str, layers: &[Vec<u8>]) -> Digest {
        let config = self.blob(format!("{{\"tag\":\"{tag}\"}}").as_bytes()).await;
        let mut blobs = Vec::new();
        for layer in layers {
            blobs.push(self.blob(layer).await);
        }
        let image = json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": config, "layers": blobs});
        let bytes = image.to_string().into_bytes();
        let digest = Digest::sha256(&bytes);
        assert_eq!(self.send(Method::PUT, &format!("{TEAM}/manifests/{tag}"), bytes).await.status(), StatusCode::CREATED);
        digest
    }

    async fn has(&self, content: &[u8]) -> bool {
        let response = self.send(Method::GET, &format!("{TEAM}/blobs/{}", Digest::sha256(content)), Vec::new()).await;
        match response.status() {
            StatusCode::OK => response.bytes().await.unwrap() == content,
            StatusCode::NOT_FOUND => false,
            status => panic!("{status}"),
        }
    }

    async fn collect(&self) {
        let answer = self.client.post(format!("{}/v1/gc", self.url)).json(&json!({})).send().await.unwrap();
        assert!(answer.status().is_success(), "{answer:?}");
    }
}

fn layer(seed: u8) -> Vec<u8> {
    (0..1_500_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn collection_frees_what_no_image_holds_and_nothing_else() {
    let folder = tempfile::TempDir::new().unwrap();
    let options = ["--lease-seconds", "4", "--gc-interval-seconds", "0", "--gc-grace-seconds", "0"];
    let mut registry = Registry::over(&folder.path().join("data"), &options);
    let pusher = Pusher::of(&registry);
    let pf = Pf::new(&registry.url());
    let pages = SnapshotDir::write(&pf.path("pages"), Shape::TINY, &(0..50).collect::<Vec<_>>());
    pf.run(&["push", pages.arg(), "team/images:state"]).ok();
    let (shared, own, loose) = (layer(1), layer(2), layer(3));
    pusher.image("one", std::slice::from_ref(&shared)).await;
    let two = pusher.image("two", &[shared.clone(), own.clone()]).await;
    pusher.blob(&loose).await;
    assert!(pusher.has(&loose).await);
    assert_eq!(pusher.send(Method::DELETE, &format!("{TEAM}/manifests/{two}"), Vec::new()).await.status(), StatusCode::ACCEPTED);
    // Until the leases of the uploads are over.
    let freed = async {
        while pusher.has(&own).await || pusher.has(&loose).await {
            pusher.collect().await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // A blob that nothing holds is not shown any more, even before a collection.
        pusher.collect().await;
    };
    tokio::time::timeout(Duration::from_secs(60), freed).await.expect("what nothing holds goes within a minute");
    assert!(pusher.has(&shared).await, "another image lists it");
    pf.run(&["verify", "team/images:state"]).ok();
    // A restart finds the same.
    registry.restart();
    let pusher = Pusher::of(&registry);
    assert!(pusher.has(&shared).await && !pusher.has(&own).await);
    let found = pusher.send(Method::GET, &format!("{TEAM}/manifests/one"), Vec::new()).await;
    assert_eq!(found.status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pf_says_where_images_are_listed() {
    let registry = Registry::start();
    Pusher::of(&registry).image("v1", &[]).await;
    let pf = Pf::new(&registry.url());
    let listed = pf.run(&["ls", "team/images"]).ok();
    assert!((listed.stdout + &listed.stderr).contains("images, which OCI clients list"));
    for command in [&["inspect", "team/images:v1"][..], &["tag", "team/images:v1", "copy"], &["rm", "team/images:v1"]] {
        let refused = pf.run(command);
        assert_eq!(refused.code, 5, "{refused:?}");
        assert!(refused.stderr.contains("images are for OCI clients"), "{refused:?}");
    }
}
