//! Every error code that can be met, met: one shape, its status, nothing internal.

use crate::common::snapshot::{page, raw_frame, snapshot, stream};
use crate::common::trouble::{self, Trouble};
use crate::common::{REPO, Registry, ok, problem, refused};
use pfr_schema::api::FramesStored;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, RepositoryName, frame};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};

fn blob(bytes: &[u8]) -> Document {
    Document::new(Kind::Blob, bytes.to_vec())
}

#[tokio::test]
async fn malformed_requests_say_where_and_what() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("latest")).await;
    let base = format!("/v1/repositories/{REPO}");
    use ErrorCode::{InvalidName, InvalidRequest, NotFound};
    let gets = [
        ("/v1/nothing".to_owned(), NotFound, "no such page"),
        ("/nothing".to_owned(), NotFound, "no such page"),
        ("/v1/repositories/UPPER/tags".to_owned(), InvalidName, "repository name"),
        (format!("{base}/snapshots/sha256:12"), InvalidName, "at least 6 hex digits"),
        (format!("{base}/snapshots/@12"), InvalidName, "at least 6 hex digits"),
        (format!("{base}/snapshots/md5:123456"), InvalidName, "unknown algorithm"),
        (format!("{base}/snapshots/.bad"), InvalidName, "tag"),
        (format!("{base}/snapshots/latest~x"), InvalidName, "number"),
        (format!("{base}/snapshots/%FF"), InvalidName, "decoded"),
        (format!("{base}/snapshots?limit=0"), InvalidRequest, "1 to 1000"),
        (format!("{base}/snapshots?limit=1001"), InvalidRequest, "1 to 1000"),
        (format!("{base}/snapshots?limit=many"), InvalidRequest, "the parameter `limit` of the address must be a whole number"),
        (format!("{base}/snapshots?page=2"), InvalidRequest, "the address has an unknown parameter `page`, expected `after` or `limit`"),
        (format!("{base}/snapshots?limit=1&limit=2"), InvalidRequest, "of the address "),
        (format!("{base}/snapshots?after=x"), InvalidRequest, "cursor"),
        (format!("{base}/snapshots/latest/lineage?limit=10001"), InvalidRequest, "1 to 10000"),
    ];
    for (path, code, words) in gets {
        let detail = refused(registry.get(&path).await, code).await;
        assert!(detail.contains(words), "{path}: {detail:?} does not say {words:?}");
    }

    let push = registry.open_push(REPO).await;
    let missing = format!("{push}/missing");
    let bodies: [(Value, ErrorCode, &str); 5] = [
        (json!({"groups": [{"kind": "blob", "digests": ["sha256:xyz"]}]}), InvalidRequest, "$.groups[0].digests[0]"),
        (json!({"groups": [{"kind": "page", "digests": []}]}), InvalidRequest, "$.groups[0].kind"),
        (json!({"groups": [], "extra": 1}), InvalidRequest, "extra"),
        (json!([]), InvalidRequest, "request body: at $: invalid type: an array, expected an object"),
        (json!({"groups": [["blob", []]]}), InvalidRequest, "at $.groups[0]: invalid type: an array, expected an object"),
    ];
    for (body, code, words) in bodies {
        let detail = refused(registry.post(&missing, &body).await, code).await;
        assert!(detail.contains(words), "{body}: {detail:?} does not say {words:?}");
    }
    let raw = |content_type: &'static str, body: &'static str| {
        let request = registry.request(Method::POST, &missing).header("content-type", content_type).body(body);
        async { request.send().await.expect("an answer") }
    };
    for (content_type, body, words) in [
        ("application/json", "{\"groups\": [}", "line 1"),
        ("application/json", "", "EOF"),
        ("application/json", "{\"groups\": []} trailing", "trailing"),
        ("text/plain", "{\"groups\": []}", "content-type application/json"),
    ] {
        let detail = refused(raw(content_type, body).await, InvalidRequest).await;
        assert!(detail.contains(words), "{body:?}: {detail:?} does not say {words:?}");
    }
    let untyped = registry.request(Method::PUT, &format!("{push}/frames")).body(stream(&[])).send().await.expect("an answer");
    assert!(refused(untyped, InvalidRequest).await.contains("application/vnd.pf.frames.v1, found none"));

    for body in [json!([[Digest::sha256(b"")]]), json!([Digest::sha256(b""), "tag"]), json!(["latest", 2, "p"]), json!([])] {
        for path in [format!("{base}/frames"), format!("{push}/commit"), format!("{base}/forks"), "/v1/gc".to_owned()] {
            let detail = refused(registry.post(&path, &body).await, InvalidRequest).await;
            assert!(detail.contains("expected an object"), "{path} {body}: {detail}");
        }
    }
    for rate in ["0", "1099511627777", "18446744073709551615"] {
        let detail =
            refused(registry.request(Method::POST, &format!("/v1/scrub?rate={rate}")).send().await.expect("an answer"), InvalidRequest)
                .await;
        assert!(detail.contains("expected a rate of 65536"), "{rate}: {detail}");
    }

    let tagless = registry.post(&format!("{push}/commit"), &json!({"manifest": Digest::sha256(b""), "if_tag_is": "absent"})).await;
    refused(tagless, InvalidRequest).await;
    refused(registry.put(&format!("{base}/tags/x"), &json!({"snapshot": "!"})).await, InvalidName).await;
    refused(registry.post(&format!("{base}/forks"), &json!({"snapshot": "latest", "count": 1, "prefix": "a b"})).await, InvalidName).await;
}

#[tokio::test]
async fn a_wrong_method_is_405_and_names_the_right_ones() {
    let registry = Registry::start().await;
    let response = registry.delete("/v1/repositories").await;
    assert_eq!((response.status(), &response.headers()["allow"]), (StatusCode::METHOD_NOT_ALLOWED, &"GET,HEAD".parse().expect("a header")));
    assert_eq!(problem(response).await.code, ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn what_does_not_exist_is_named() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("latest")).await;
    let base = format!("/v1/repositories/{REPO}");
    let absent = Digest::sha256(b"absent");
    refused(registry.get("/v1/repositories/nobody/snapshots").await, ErrorCode::RepositoryUnknown).await;
    refused(registry.get("/v1/repositories/nobody/stats").await, ErrorCode::RepositoryUnknown).await;
    refused(registry.post("/v1/repositories/nobody/frames", &json!({"digests": []})).await, ErrorCode::RepositoryUnknown).await;
    refused(registry.get(&format!("{base}/snapshots/{absent}")).await, ErrorCode::SnapshotUnknown).await;
    refused(registry.get(&format!("{base}/snapshots/latest~1")).await, ErrorCode::SnapshotUnknown).await;
    refused(registry.delete(&format!("{base}/snapshots/{absent}")).await, ErrorCode::SnapshotUnknown).await;
    refused(registry.get(&format!("{base}/snapshots/other")).await, ErrorCode::TagUnknown).await;
    refused(registry.post(&format!("{base}/frames"), &json!({"digests": [absent]})).await, ErrorCode::BlobUnknown).await;
    let push = registry.open_push(REPO).await;
    refused(registry.post(&format!("{push}/commit"), &json!({"manifest": absent})).await, ErrorCode::BlobUnknown).await;
    let id = push.rsplit('/').next().expect("an id");
    for path in [
        format!("/v1/repositories/other/pushes/{id}"),
        format!("{base}/pushes/nonsense"),
        format!("{base}/pushes/{}", uuid::Uuid::now_v7()),
    ] {
        refused(registry.delete(&path).await, ErrorCode::PushUnknown).await;
        refused(registry.post(&format!("{path}/missing"), &json!({"groups": []})).await, ErrorCode::PushUnknown).await;
        refused(registry.put_frames(&path, stream(&[])).await, ErrorCode::PushUnknown).await;
    }
    assert_eq!(registry.delete(&push).await.status(), StatusCode::NO_CONTENT, "others' attempts did not end the session");
}

#[tokio::test]
async fn bad_frames_are_refused_each_with_its_code() {
    let registry = Registry::start().await;
    let push = registry.open_push(REPO).await;
    let good = blob(b"some bytes");
    let whole = stream(std::slice::from_ref(&good));
    let mut flipped = whole.clone();
    let middle = whole.len() - frame::END_LEN - frame::CHECKSUM - 1;
    flipped[middle] ^= 1;
    let lying = [raw_frame(Kind::Blob, Digest::sha256(b"other"), &good.bytes), frame::end_mark(1)].concat();
    let run = snapshot(0..2, vec![]).of_kind(Kind::Run).next().expect("a run").clone();
    let garbage = Document::new(Kind::Tree, b"{}".to_vec());
    let cases: [(&str, Vec<u8>, ErrorCode); 6] = [
        ("no magic", b"nonsense, and enough of it to be a header of a frame".to_vec(), ErrorCode::CorruptFrame),
        ("a flipped bit", flipped, ErrorCode::CorruptFrame),
        ("no end mark", whole[..whole.len() - frame::END_LEN].to_vec(), ErrorCode::Truncated),
        ("another name", lying, ErrorCode::DigestMismatch),
        ("a node before its children", stream(&[run]), ErrorCode::MissingBlobs),
        ("a node that does not parse", stream(&[garbage]), ErrorCode::InvalidDocument),
    ];
    for (what, body, code) in cases {
        let problem = problem(registry.put_frames(&push, body).await).await;
        assert_eq!(problem.code, code, "{what}: {}", problem.detail);
        assert_eq!(problem.missing.len(), if code == ErrorCode::MissingBlobs { 4 } else { 0 }, "{what}");
    }
    let _: FramesStored = ok(registry.put_frames(&push, whole).await).await;
}

#[tokio::test]
async fn a_blob_of_another_length_than_its_node_says_is_length_mismatch() {
    let registry = Registry::start().await;
    let push = registry.open_push(REPO).await;
    let short = blob(b"short");
    let run = pfr_schema::run::Run::new(1, 4096, vec![short.digest]).expect("a run");
    let run = Document::new(Kind::Run, run.to_bytes());
    refused(registry.put_frames(&push, stream(&[short, run])).await, ErrorCode::LengthMismatch).await;
}

#[tokio::test]
async fn damage_on_disk_is_corrupt_store_and_the_words_of_the_system_stay_in_the_log() {
    let registry = Registry::start().await;
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    let packs = registry.dir.path().join("store/packs");
    let mut damaged = 0;
    let mut folders = vec![packs];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let length = std::fs::metadata(&path).expect("a pack").len();
                std::fs::write(&path, vec![0; length as usize]).expect("a pack can be overwritten");
                damaged += 1;
            }
        }
    }
    assert!(damaged > 0);
    let detail =
        refused(registry.post(&format!("/v1/repositories/{REPO}/snapshots/latest/verify"), &json!({})).await, ErrorCode::CorruptStore)
            .await;
    assert!(!detail.contains("store/packs"), "{detail}");
}

#[tokio::test]
async fn a_store_in_trouble_is_unavailable_full_or_a_bug_but_never_missing() {
    let (store, switch) = trouble::store().await;
    let registry = Registry::start_over(store).await;
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    assert_eq!(registry.get("/readyz").await.status(), StatusCode::OK);

    let read = async || registry.get(&format!("/v1/repositories/{REPO}/snapshots/latest")).await;
    let write = async || -> Response {
        let push = registry.open_push(REPO).await;
        registry.put_frames(&push, stream(&[blob(b"new")])).await
    };
    switch.set(Trouble::Unreachable);
    for response in [read().await, write().await, registry.get("/readyz").await] {
        let retry = response.headers().get("retry-after").cloned();
        let detail = refused(response, ErrorCode::Unavailable).await;
        assert!(retry.is_some() && !detail.contains("secret"), "{detail}");
    }
    switch.set(Trouble::Full);
    let detail = refused(write().await, ErrorCode::StorageFull).await;
    assert!(detail.contains("disk is full"), "{detail}");
    switch.set(Trouble::Panic);
    let detail = refused(read().await, ErrorCode::Internal).await;
    assert!(!detail.contains("asked for"), "{detail}");
    switch.set(Trouble::None);
    assert_eq!(read().await.status(), StatusCode::OK, "the registry outlives all of it");
}

#[tokio::test]
async fn a_download_that_breaks_is_refused_at_its_start_and_cut_later() {
    let (store, switch) = trouble::store().await;
    let registry = Registry::start_over(store).await;
    registry.push(REPO, &snapshot(0..1, vec![]), None).await;
    // More than the registry reads ahead and the kernel buffers.
    let blobs: Vec<Document> = (0..64_u64).map(|i| Document::new(Kind::Blob, page(i).repeat(1024))).collect();
    let digests: Vec<Digest> = blobs.iter().map(|b| b.digest).collect();
    let push = registry.open_push(REPO).await;
    let _: FramesStored = ok(registry.put_frames(&push, stream(&blobs)).await).await;
    let ask = async || registry.post(&format!("/v1/repositories/{REPO}/frames"), &json!({"digests": digests})).await;

    switch.set(Trouble::Unreachable);
    refused(ask().await, ErrorCode::Unavailable).await;
    switch.set(Trouble::None);
    let mut response = ask().await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.chunk().await.expect("a piece").is_some());
    switch.set(Trouble::Unreachable);
    assert!(response.bytes().await.is_err(), "a cut stream must not look whole");
}

#[tokio::test]
async fn request_ids_are_kept_if_sane_and_made_otherwise() {
    let registry = Registry::start().await;
    let ask = async |id: &str| registry.request(Method::GET, "/v1/x").header("x-request-id", id).send().await.expect("an answer");
    assert_eq!(problem(ask("trace-1.a_b").await).await.request_id.as_deref(), Some("trace-1.a_b"));
    for bad in ["a b", "", &"x".repeat(129), "<script>"] {
        let made = problem(ask(bad).await).await.request_id.expect("an id");
        assert!(made.parse::<uuid::Uuid>().is_ok(), "{bad:?} became {made:?}");
    }
    assert!(registry.get("/livez").await.headers().contains_key("x-request-id"));
}

#[tokio::test]
async fn names_with_slashes_are_one_segment() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..1, vec![]), Some("latest")).await;
    let name: RepositoryName = "team/agent".parse().expect("a name");
    assert_eq!(registry.store.repositories(None, 10).await.expect("a list").rows[0].name, name);
    refused(registry.get("/v1/repositories/team/agent/tags").await, ErrorCode::NotFound).await;
}

#[tokio::test]
async fn documents_that_are_arrays_are_refused() {
    let registry = Registry::start().await;
    let push = registry.open_push(REPO).await;
    let config = blob(b"[]");
    let manifest = pfr_schema::snapshot::Manifest::snapshot(&config, vec![], Default::default()).to_document();
    let _: FramesStored = ok(registry.put_frames(&push, stream(&[config, manifest.clone()])).await).await;
    let detail =
        refused(registry.post(&format!("{push}/commit"), &json!({"manifest": manifest.digest})).await, ErrorCode::InvalidDocument).await;
    assert!(detail.contains("snapshot configuration: at $: invalid type: an array, expected an object"), "{detail}");
    let array = serde_json::to_vec(&json!([2, pfr_schema::media_type::OCI_MANIFEST])).expect("JSON");
    let frames = stream(&[Document::new(Kind::Manifest, array)]);
    let detail = refused(registry.put_frames(&push, frames).await, ErrorCode::InvalidDocument).await;
    assert!(detail.contains("snapshot manifest: at $: invalid type: an array, expected an object"), "{detail}");
}

#[tokio::test]
async fn a_shortened_digest_names_a_snapshot_wherever_a_reference_does() {
    let registry = Registry::start().await;
    let one = registry.push(REPO, &snapshot(0..2, vec![]), Some("one")).await.digest;
    let two = registry.push(REPO, &snapshot(2..4, vec![one]), Some("two")).await.digest;
    let base = format!("/v1/repositories/{REPO}");
    for short in [format!("@{}", two.short()), format!("sha256:{}", two.short()), format!("@sha256:{}", two.short())] {
        let detail: Value = ok(registry.get(&format!("{base}/snapshots/{short}")).await).await;
        assert_eq!(detail["summary"]["digest"], two.to_string(), "{short}");
        let lineage: Value = ok(registry.get(&format!("{base}/snapshots/{short}/lineage")).await).await;
        assert_eq!(lineage["snapshots"][1]["digest"], one.to_string(), "{short}");
        let diff: Value = ok(registry.get(&format!("{base}/snapshots/{short}/diff/@{}", one.short())).await).await;
        assert_eq!((&diff["a"], &diff["b"]), (&json!(two), &json!(one)), "{short}");
        let verified: Value =
            ok(registry.request(Method::POST, &format!("{base}/snapshots/{short}/verify")).send().await.expect("an answer")).await;
        assert_eq!(verified["digest"], two.to_string(), "{short}");
        let tagged: Value = ok(registry.put(&format!("{base}/tags/short"), &json!({"snapshot": short})).await).await;
        assert_eq!(tagged["digest"], two.to_string(), "{short}");
    }
    let forked: Value =
        ok(registry.post(&format!("{base}/forks"), &json!({"snapshot": format!("@{}", one.short()), "count": 1, "prefix": "f"})).await)
            .await;
    assert_eq!(forked["digest"], one.to_string());
    refused(registry.get(&format!("{base}/snapshots/@abcdef123456")).await, ErrorCode::SnapshotUnknown).await;
    assert_eq!(registry.delete(&format!("{base}/snapshots/@{}", two.short())).await.status(), StatusCode::NO_CONTENT);
    refused(registry.get(&format!("{base}/snapshots/@{}", two.short())).await, ErrorCode::SnapshotUnknown).await;
}
