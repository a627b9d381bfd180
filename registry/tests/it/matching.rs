//! `match` over HTTP: the longest prefix is found, rejected snapshots have reasons, and malformed
//! requests are refused.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::MatchResponse;
use pfr_schema::checkpoint::Key;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, media_type, prefix};
use serde_json::json;
use std::collections::BTreeMap;

/// A snapshot of the state after `tokens`.
fn of(tokens: &[u32]) -> Snapshot {
    let fingerprint = Digest::sha256(b"deployment");
    let prefix = prefix::key(&fingerprint, "s", None, tokens);
    let key = Key { scheme: prefix::SCHEME.into(), prefix, tokens: tokens.len() as u64, alignment: 1, salt: "s".into(), adapter: None };
    let config = SnapshotConfig { fingerprint: Some(fingerprint), prefix: Some(key), ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let list = Document::new(Kind::Blob, tokens.iter().flat_map(|token| token.to_le_bytes()).collect());
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TOKENS, &list)], BTreeMap::new()).to_document();
    let flat = snapshot(0..1, vec![]).flat;
    Snapshot { manifest: manifest.digest, config: config.digest, flat, blobs: vec![config, list, manifest] }
}

#[tokio::test]
async fn tokens_find_the_deepest_snapshot_and_hear_why_others_do_not_fit() {
    let registry = Registry::start().await;
    let path = format!("/v1/repositories/{REPO}/match");
    let fingerprint = Digest::sha256(b"deployment");
    let ask = |tokens: &[u32], salt: &str| json!({"tokens": tokens, "fingerprint": fingerprint, "salt": salt});
    refused(registry.post(&path, &ask(&[1], "s")).await, ErrorCode::RepositoryUnknown).await;

    let (near, far) = (of(&[1, 2]), of(&[1, 2, 3, 4, 5]));
    registry.push(REPO, &near, None).await;
    registry.push(REPO, &far, None).await;
    let whole: MatchResponse = ok(registry.post(&path, &ask(&[1, 2, 3, 4, 5, 6], "s")).await).await;
    assert_eq!((whole.digest, whole.boundary, whole.rejected.len()), (Some(far.manifest), 5, 0));
    let part: MatchResponse = ok(registry.post(&path, &ask(&[1, 2, 3, 9, 9], "s")).await).await;
    assert_eq!((part.digest, part.boundary), (Some(near.manifest), 2));
    assert_eq!((part.rejected[0].digest, part.rejected[0].common), (far.manifest, 3));
    let none: MatchResponse = ok(registry.post(&path, &ask(&[1, 2, 3], "")).await).await;
    assert_eq!((none.digest, none.boundary, none.rejected[0].reason.as_str()), (None, 0, "another salt"));

    let detail = refused(registry.post(&path, &json!({"tokens": [-1], "fingerprint": fingerprint})).await, ErrorCode::InvalidRequest).await;
    assert!(detail.contains("tokens[0]"), "{detail}");
    refused(registry.post(&path, &json!({"tokens": [1], "fingerprint": fingerprint, "pepper": 1})).await, ErrorCode::InvalidRequest).await;
    registry.stopped().await;
}
