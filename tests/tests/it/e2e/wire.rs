//! Raw requests that no honest client makes: each is refused, nothing is visible, the registry
//! lives on.

use pfr_schema::frame::{self, Header};
use pfr_schema::{Digest, Kind, codec::Codec};
use pfr_tests::{Pf, Registry, Wire};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

struct Session {
    client: Client,
    base: String,
    registry: Registry,
}

impl Session {
    async fn open() -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let registry = Registry::start();
        let client = Client::builder().no_proxy().build().unwrap();
        let url = format!("{}/v1/repositories/a%2Fb/pushes", registry.url());
        let push: Value = client.post(&url).send().await.unwrap().json().await.unwrap();
        Self { client, base: format!("{url}/{}", push["id"].as_str().unwrap()), registry }
    }

    async fn frames(&self, body: Vec<u8>) -> (StatusCode, Value) {
        let request = self.client.put(format!("{}/frames", self.base)).header("content-type", "application/vnd.pf.frames.v1").body(body);
        let response = request.send().await.unwrap();
        (response.status(), response.json().await.unwrap_or_default())
    }

    async fn lacks(&self, digest: &Digest, kind: &str) -> bool {
        let body = json!({"groups": [{"kind": kind, "digests": [digest]}]});
        let answer: Value = self.client.post(format!("{}/missing", self.base)).json(&body).send().await.unwrap().json().await.unwrap();
        answer["missing"] == json!([[0, 1]])
    }
}

#[tokio::test]
async fn a_frame_stream_cut_anywhere_is_refused() {
    let session = Session::open().await;
    let (one, two) = (vec![1; 40], vec![2; 70]);
    let whole = Wire::stream(&[Wire::blob(&one), Wire::blob(&two)]);
    for end in 0..whole.len() {
        let (status, problem) = session.frames(whole[..end].to_vec()).await;
        assert!(status.is_client_error() && problem["code"] == "truncated", "cut at {end}: {status} {problem}");
    }
    let (status, stored) = session.frames(whole).await;
    assert_eq!((status, &stored["frames"]), (StatusCode::OK, &json!(2)), "{stored}");
    assert_eq!(Pf::new(&session.registry.url()).visible(), json!([]));
}

#[tokio::test]
async fn any_flipped_byte_of_a_frame_stream_is_refused() {
    let session = Session::open().await;
    let raw = vec![9; 40];
    let whole = Wire::stream(&[Wire::blob(&raw)]);
    for at in 0..whole.len() {
        let mut bad = whole.clone();
        bad[at] ^= 0x04;
        let (status, problem) = session.frames(bad).await;
        assert!(status.is_client_error(), "byte {at}: {status} {problem}");
        assert!(["corrupt_frame", "truncated", "digest_mismatch"].contains(&problem["code"].as_str().unwrap()), "byte {at}: {problem}");
    }
    assert_eq!(Pf::new(&session.registry.url()).visible(), json!([]));
}

#[tokio::test]
async fn lies_are_refused_before_they_cost_memory() {
    let session = Session::open().await;
    let digest = Digest::sha256(b"x");
    let lie = |codec, kind, raw_len, stored_len| Header { codec, kind, digest, raw_len, stored_len }.to_bytes();
    let bomb = zstd::bulk::compress(&vec![0; 1 << 26], 3).unwrap();
    let bomb_header =
        Header { codec: Codec::Zstd, kind: Kind::Blob, digest, raw_len: bomb.len() as u64 + 10, stored_len: bomb.len() as u64 };
    let wrong = Wire::frame(Kind::Blob, Digest::sha256(b"other"), b"these");
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("an exabyte", lie(Codec::Raw, Kind::Blob, 1 << 60, 1 << 60), "corrupt_frame"),
        ("a node of a gigabyte", lie(Codec::Raw, Kind::Tree, 1 << 30, 1 << 30), "corrupt_frame"),
        ("lengths that disagree", lie(Codec::Raw, Kind::Blob, 10, 11), "corrupt_frame"),
        ("a zip bomb", frame::encode(&bomb_header, &bomb), "corrupt_frame"),
        ("other bytes", Wire::stream(&[wrong]), "digest_mismatch"),
        ("no frames at all", b"hello, registry, these are no frames".to_vec(), "corrupt_frame"),
        ("nothing", vec![], "truncated"),
        ("too few frames for the end mark", [Wire::blob(b"a"), frame::end_mark(2)].concat(), "corrupt_frame"),
        ("bytes after the end", [frame::end_mark(0), vec![0]].concat(), "corrupt_frame"),
        ("a run that is none", Wire::stream(&[Wire::frame(Kind::Run, Digest::sha256(b"PFRN"), b"PFRN")]), "invalid_document"),
        ("a manifest that is none", Wire::stream(&[Wire::frame(Kind::Manifest, Digest::sha256(b"{}"), b"{}")]), "invalid_document"),
    ];
    for (name, body, code) in cases {
        let (status, problem) = session.frames(body).await;
        assert!(status.is_client_error() && problem["code"] == code, "{name}: {status} {problem}");
    }
    assert!(session.registry.peak_memory() < 128 << 20);
}

#[tokio::test]
async fn a_node_before_its_children_and_a_commit_of_a_blob_that_is_no_manifest_are_refused() {
    let session = Session::open().await;
    let page = Digest::sha256(&[1; 128]);
    let run = pfr_schema::run::Run::new(2, 128, vec![page, page]).unwrap().to_bytes();
    let digest = Digest::sha256(&run);
    let (status, problem) = session.frames(Wire::stream(&[Wire::frame(Kind::Run, digest, &run)])).await;
    assert!(status.is_client_error() && problem["code"] == "missing_blobs", "{status} {problem}");
    assert_eq!(problem["missing"], json!([page]), "{problem}");
    assert!(session.lacks(&digest, "run").await);
    session.frames(Wire::stream(&[Wire::blob(&[1; 128]), Wire::frame(Kind::Run, digest, &run)])).await;
    assert!(!session.lacks(&digest, "run").await);
    for manifest in [digest, page, Digest::sha256(b"nowhere")] {
        let response =
            session.client.post(format!("{}/commit", session.base)).json(&json!({"manifest": manifest, "tag": "t"})).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert_eq!(response.json::<Value>().await.unwrap()["code"], "blob_unknown");
    }
    assert_eq!(Pf::new(&session.registry.url()).visible(), json!([]));
}

#[tokio::test]
async fn requests_that_are_too_large_or_malformed_are_refused() {
    let session = Session::open().await;
    let digests: Vec<String> = (0..200_000_u32).map(|i| Digest::sha256(&i.to_le_bytes()).to_string()).collect();
    let post = |body: Vec<u8>| {
        session.client.post(format!("{}/missing", session.base)).header("content-type", "application/json").body(body).send()
    };
    let many = post(serde_json::to_vec(&json!({"groups": [{"kind": "blob", "digests": digests}]})).unwrap()).await.unwrap();
    assert_eq!(many.status(), StatusCode::PAYLOAD_TOO_LARGE);
    for body in [
        &b"{"[..],
        b"[]",
        br#"{"groups":[{"kind":"cake","digests":[]}]}"#,
        br#"{"groups":[{"kind":"blob","digests":["sha256:AA"]}]}"#,
        br#"{"groups":[],"x":1}"#,
    ] {
        let response = post(body.to_vec()).await.unwrap();
        assert!(response.status().is_client_error());
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }
    let response = session
        .client
        .post(format!("{}/missing", session.base.replace("a%2Fb", "other")))
        .json(&json!({"groups": []}))
        .send()
        .await
        .unwrap();
    assert_eq!(response.json::<Value>().await.unwrap()["code"], "push_unknown", "a session belongs to its repository");
}
