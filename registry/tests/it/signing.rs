//! Signatures over HTTP: callers that may push add them, all that may pull see them, and policies
//! of a domain's administrator let tags be put only on what is signed.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::{self, NewSignature, SigningPolicies};
use pfr_schema::signature::{self, ARTIFACT, PublicKey};
use pfr_schema::{Digest, ErrorCode};
use pfr_store::PrivateKey;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

fn key() -> PrivateKey {
    PrivateKey::generate().unwrap().0
}

fn new(key: &PrivateKey, digest: Digest) -> NewSignature {
    key.sign(digest, &REPO.replace("%2F", "/").parse().unwrap(), 1_700_000_000_000)
}

fn at(snapshot: impl std::fmt::Display) -> String {
    format!("/v1/repositories/{REPO}/snapshots/{snapshot}/signatures")
}

async fn detail(registry: &Registry, digest: Digest) -> Value {
    ok(registry.get(&format!("/v1/repositories/{REPO}/snapshots/{digest}")).await).await
}

#[tokio::test]
async fn a_signature_is_a_referrer_that_cosign_finds_and_details_show() {
    let registry = Registry::start().await;
    let s = snapshot(0..3, vec![]);
    registry.push(REPO, &s, Some("a")).await;
    let (digest, mine) = (s.manifest, key());
    assert!(detail(&registry, digest).await.get("signatures").is_none());
    let request = json!({"signatures": [new(&mine, digest)]});
    for _ in 0..2 {
        let all: api::Signatures = ok(registry.post(&at("a"), &request).await).await;
        assert_eq!((all.digest, all.signatures.len()), (digest, 1), "the same request again adds none");
        assert_eq!((all.signatures[0].key_id, all.signatures[0].signed_at), (Some(mine.public().id()), Some(1_700_000_000_000)));
    }
    assert_eq!(detail(&registry, digest).await["signatures"][0]["key_id"], json!(mine.public().id()));
    // As OCI clients see it.
    let kind = ARTIFACT.replace('+', "%2B");
    let referrers: Value = ok(registry.get(&format!("/v2/{REPO}/referrers/{digest}?artifactType={kind}")).await).await;
    let tag = signature::tag_of(&digest).unwrap();
    let manifest: Value = ok(registry.get(&format!("/v2/{REPO}/manifests/{tag}")).await).await;
    assert_eq!(referrers["manifests"].as_array().unwrap().len(), 1, "{referrers}");
    assert_eq!((manifest["subject"]["digest"].clone(), manifest["artifactType"].as_str()), (json!(digest), Some(ARTIFACT)));
    let layer = &manifest["layers"][0];
    let payload = registry.get(&format!("/v2/{REPO}/blobs/{}", layer["digest"].as_str().unwrap())).await.text().await.unwrap();
    assert_eq!(payload, new(&mine, digest).payload);
    assert_eq!(layer["annotations"][signature::ANNOTATION], new(&mine, digest).signature);
    let list: api::SignatureList = ok(registry.get(&format!("/v1/repositories/{REPO}/signatures?limit=1")).await).await;
    assert_eq!((list.signatures[0].snapshot, list.next), (digest, None));
    // The page of the snapshot names the key.
    let page = registry.get(&format!("/ui/{}/{digest}", REPO.replace('/', "%2F"))).await.text().await.unwrap();
    assert!(page.contains("Signatures") && page.contains(&mine.public().id().to_string()), "{page}");

    for (wrong, code) in [
        (json!({"signatures": [new(&mine, Digest::sha256(b"other"))]}), ErrorCode::InvalidDocument),
        (json!({"signatures": [{"payload": "{}", "signature": "AAAA"}]}), ErrorCode::InvalidDocument),
        (json!({"signatures": [{"payload": "{}", "sig": "AAAA"}]}), ErrorCode::InvalidRequest),
        (json!({"signatures": vec![new(&mine, digest); 101]}), ErrorCode::InvalidRequest),
    ] {
        refused(registry.post(&at("a"), &wrong).await, code).await;
    }
    refused(registry.post(&at("nowhere"), &request).await, ErrorCode::TagUnknown).await;
    refused(registry.post(&at(Digest::sha256(b"")), &request).await, ErrorCode::SnapshotUnknown).await;
    // It goes with its snapshot, in the same change.
    registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{digest}")).await;
    assert_eq!(registry.get(&format!("/v2/{REPO}/manifests/{tag}")).await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_policy_refuses_a_tag_by_every_way_and_each_refusal_is_in_the_audit_log() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let (admin, pusher, reader) = (
        registry.token(&["*:pull,push,delete,admin"]).await,
        registry.token(&["team/*:pull,push"]).await,
        registry.token(&["team/*:pull"]).await,
    );
    let s = snapshot(0..3, vec![]);
    let repository = REPO.replace("%2F", "/").parse().unwrap();
    let session = registry.store.open_push(&repository).await.unwrap();
    registry.store.ingest(&session.id, futures::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from(s.stream()))])).await.unwrap();
    registry.store.commit(&session.id, s.manifest, None, None).await.unwrap();
    let mine = key();
    let policies = json!({"policies": [{"name": "releases", "repositories": "team/*", "tags": ["v*"], "keys": [mine.public()]}]});
    let put = |path: &str, body: &Value| registry.request(Method::PUT, path).json(body);
    let denied = registry.send_as(&pusher, put("/v1/signing", &policies)).await;
    refused(denied, ErrorCode::Denied).await;
    let set: SigningPolicies = ok(registry.send_as(&admin, put("/v1/signing", &policies)).await).await;
    assert_eq!(set.policies[0].keys, [mine.public()]);
    let tag = format!("/v1/repositories/{REPO}/tags/v1");
    let of = json!({"snapshot": s.manifest.to_string()});
    for token in [&pusher, &admin] {
        let words = refused(registry.send_as(token, put(&tag, &of)).await, ErrorCode::SignatureRequired).await;
        assert!(words.contains("releases") && words.contains("v1"), "{words}");
    }
    let fork = json!({"snapshot": s.manifest.to_string(), "count": 2, "prefix": "v"});
    let fork = registry.request(Method::POST, &format!("/v1/repositories/{REPO}/forks")).json(&fork);
    refused(registry.send_as(&pusher, fork).await, ErrorCode::SignatureRequired).await;
    let manifest = registry.store.read(&s.manifest).await.unwrap();
    let oci = registry.request(Method::PUT, &format!("/v2/{REPO}/manifests/v1")).body(manifest);
    assert_eq!(registry.send_as(&pusher, oci).await.status(), StatusCode::FORBIDDEN);
    // A reader cannot sign, and learns nothing of what it may not see.
    let sign = |path: &str| registry.request(Method::POST, path).json(&json!({"signatures": [new(&mine, s.manifest)]}));
    refused(registry.send_as(&reader, sign(&at(s.manifest))).await, ErrorCode::Denied).await;
    let hidden = registry.token(&["other/*:pull,push"]).await;
    refused(registry.send_as(&hidden, sign(&at(s.manifest))).await, ErrorCode::RepositoryUnknown).await;
    ok::<api::Signatures>(registry.send_as(&pusher, sign(&at(s.manifest))).await).await;
    ok::<api::TagInfo>(registry.send_as(&pusher, put(&tag, &of)).await).await;

    let request = registry.request(Method::GET, "/v1/audit?order=oldest&limit=1000");
    let log: api::AuditList = ok(registry.send_as(&admin, request).await).await;
    let codes = log.records.iter().filter(|record| record.code.as_deref() == Some("signature_required"));
    assert!(codes.clone().all(|record| record.outcome == api::AuditOutcome::Refused), "{:?}", log.records);
    assert_eq!(codes.count(), 4);
    let done = |operation: &str| log.records.iter().filter(|r| r.operation == operation && r.outcome == api::AuditOutcome::Done).count();
    assert_eq!([done("set_signing"), done("sign"), done("put_tag")], [1, 1, 1]);
}

#[tokio::test]
async fn policies_that_cannot_be_meant_are_refused_with_their_place() {
    let registry = Registry::start().await;
    let key = PublicKey::new([1; 32]);
    for (wrong, words) in [
        (json!([{"name": "a", "repositories": "*", "keys": []}]), "$.policies[0].keys"),
        (json!([{"name": "a", "repositories": "*", "keys": ["PEM"]}]), "keys"),
        (json!([{"name": "a", "repositories": "*", "keys": [key], "tag": "v*"}]), "tag"),
        (json!([{"name": "a b", "repositories": "*", "keys": [key]}]), "$.policies[0].name"),
    ] {
        let said = refused(registry.put("/v1/signing", &json!({"policies": wrong})).await, ErrorCode::InvalidRequest).await;
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(registry.store.metadata().signing().await.unwrap().version, 0);
}
