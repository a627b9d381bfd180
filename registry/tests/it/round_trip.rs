//! Every endpoint in the order in which a client uses them: what went in comes out, byte for byte.

use crate::common::snapshot::{Snapshot, snapshot, stream};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::{self, SnapshotDetail};
use pfr_schema::{Digest, ErrorCode, Kind, media_type};
use reqwest::StatusCode;
use serde_json::{Value, json};

/// What the registry lacks of a snapshot, asked by kind as a client does.
async fn missing(registry: &Registry, push: &str, blobs: &Snapshot) -> Vec<(u64, u64)> {
    let groups: Vec<Value> = [Kind::Manifest, Kind::Tree, Kind::Run, Kind::Blob]
        .into_iter()
        .map(|kind| json!({"kind": kind, "digests": blobs.of_kind(kind).map(|b| b.digest).collect::<Vec<Digest>>()}))
        .collect();
    let response: api::MissingResponse = ok(registry.post(&format!("{push}/missing"), &json!({"groups": groups})).await).await;
    response.missing
}

#[tokio::test]
async fn what_is_pushed_comes_back_byte_for_byte() {
    let registry = Registry::start().await;
    let sample = snapshot(0..100, vec![]);
    let push = registry.open_push(REPO).await;
    let count = sample.blobs.len() as u64;
    assert_eq!(missing(&registry, &push, &sample).await, [(0, count)], "an empty registry lacks everything");

    let stored: api::FramesStored = ok(registry.put_frames(&push, sample.stream()).await).await;
    assert_eq!((stored.frames, stored.new), (count, count));
    assert_eq!(missing(&registry, &push, &sample).await, []);

    let response = registry.post(&format!("{push}/commit"), &json!({"manifest": sample.manifest, "tag": "latest"})).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    let committed: api::Committed = ok(response).await;
    assert_eq!((committed.digest, committed.created), (sample.manifest, true));
    refused(registry.post(&format!("{push}/commit"), &json!({"manifest": sample.manifest})).await, ErrorCode::PushUnknown).await;

    let digests: Vec<Digest> = sample.digests().into_iter().rev().collect();
    let came = registry.fetch(REPO, &digests).await;
    let sent: Vec<(Kind, Vec<u8>)> = sample.blobs.iter().rev().map(|b| (b.kind, b.bytes.clone())).collect();
    assert_eq!(came.len(), sent.len());
    for (i, (came, sent)) in came.iter().zip(&sent).enumerate() {
        assert!(came == sent, "frame {i}, {:?}, differs", sent.0);
    }

    let path = format!("/v1/repositories/{REPO}/snapshots/latest/page-manifest");
    for query in ["", "?group=main&rank=0"] {
        let response = registry.get(&format!("{path}{query}")).await;
        assert_eq!(response.headers()["content-type"], media_type::FLAT_MANIFEST);
        let etag = response.headers()["etag"].to_str().expect("text").to_owned();
        let bytes = response.bytes().await.expect("a body");
        assert!(bytes == sample.flat.to_bytes(), "the flat manifest is not what was pushed");
        assert_eq!(etag, format!("\"{}\"", Digest::sha256(&bytes)));
    }
    refused(registry.get(&format!("{path}?rank=1")).await, ErrorCode::NotFound).await;
    registry.stopped().await;
}

#[tokio::test]
async fn a_second_push_of_the_same_snapshot_sends_nothing_and_answers_200() {
    let registry = Registry::start().await;
    let sample = snapshot(0..3, vec![]);
    registry.push(REPO, &sample, None).await;
    let push = registry.open_push(REPO).await;
    assert_eq!(missing(&registry, &push, &sample).await, []);
    let response = registry.post(&format!("{push}/commit"), &json!({"manifest": sample.manifest})).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!ok::<api::Committed>(response).await.created);
}

/// What a deletion of snapshots would free.
async fn freed(registry: &Registry, snapshots: &[Digest]) -> api::Freed {
    let request = json!({"repositories": [{"repository": "team/agent", "snapshots": snapshots}]});
    ok(registry.post("/v1/freed", &request).await).await
}

#[tokio::test]
async fn snapshots_can_be_listed_walked_compared_proven_and_deleted() {
    let registry = Registry::start().await;
    let first = snapshot(0..4, vec![]);
    let second = snapshot(0..6, vec![first.manifest]);
    registry.push(REPO, &first, Some("latest")).await;
    registry.push(REPO, &second, Some("latest")).await;
    let base = format!("/v1/repositories/{REPO}");

    let detail: SnapshotDetail = ok(registry.get(&format!("{base}/snapshots/latest")).await).await;
    assert_eq!((detail.summary.digest, &detail.summary.parents[..]), (second.manifest, &[first.manifest][..]));
    assert_eq!((detail.trees.len(), detail.trees[0].pages(), detail.config.agent.as_deref()), (1, 6, Some("test")));
    let parent: SnapshotDetail = ok(registry.get(&format!("{base}/snapshots/latest~1")).await).await;
    assert_eq!(parent.summary.digest, first.manifest);
    let same: SnapshotDetail = ok(registry.get(&format!("{base}/snapshots/{}", first.manifest)).await).await;
    assert_eq!(same, parent);

    let page: api::SnapshotList = ok(registry.get(&format!("{base}/snapshots?limit=1")).await).await;
    assert_eq!(page.snapshots.iter().map(|s| s.digest).collect::<Vec<_>>(), [second.manifest]);
    let next = page.next.expect("a second page");
    let page: api::SnapshotList = ok(registry.get(&format!("{base}/snapshots?limit=1&after={next}")).await).await;
    assert_eq!((page.snapshots[0].digest, page.next), (first.manifest, None));

    let lineage: api::Lineage = ok(registry.get(&format!("{base}/snapshots/latest/lineage")).await).await;
    assert_eq!(lineage.snapshots.iter().map(|s| s.digest).collect::<Vec<_>>(), [second.manifest, first.manifest]);
    let lineage: api::Lineage = ok(registry.get(&format!("{base}/snapshots/latest/lineage?limit=1")).await).await;
    assert_eq!((lineage.snapshots.len(), lineage.truncated), (1, true));

    let diff: api::Diff = ok(registry.get(&format!("{base}/snapshots/latest~1/diff/latest")).await).await;
    assert_eq!((diff.a, diff.b, diff.groups[0].pages, diff.groups[0].pages_shared), (first.manifest, second.manifest, (4, 6), 4));

    let proven: api::Verified = ok(registry.post(&format!("{base}/snapshots/latest/verify"), &json!({})).await).await;
    assert_eq!((proven.digest, proven.blobs), (second.manifest, second.blobs.len() as u64));

    let list: api::RepositoryList = ok(registry.get("/v1/repositories?limit=10").await).await;
    assert_eq!((list.repositories[0].name.as_str(), list.repositories[0].snapshots, list.repositories[0].tags), ("team/agent", 2, 1));

    for path in ["/v1/stats".to_owned(), format!("{base}/stats")] {
        let stats: api::Stats = ok(registry.get(&path).await).await;
        assert_eq!(stats.snapshots.len(), 2, "{path}");
        assert!(stats.logical > stats.unique && stats.dedup_ratio > 1.0, "{path}: {stats:?}");
        assert_eq!(stats.repository.is_some(), path != "/v1/stats");
    }

    for (query, expected) in [
        ("below=latest", vec![second.manifest]),
        ("below=latest~1", vec![first.manifest, second.manifest]),
        ("agent=test", vec![first.manifest, second.manifest]),
        ("below=latest&agent=test", vec![second.manifest]),
        ("agent=tes", vec![]),
    ] {
        let stats: api::Stats = ok(registry.get(&format!("{base}/stats?{query}")).await).await;
        assert_eq!((stats.below.is_some(), stats.agent.is_some()), (query.contains("below="), query.contains("agent=")), "{query}");
        assert!(stats.below.is_none_or(|below| below == expected[0]), "{query}: {stats:?}");
        assert_eq!(stats.snapshots.iter().map(|s| s.digest).collect::<Vec<_>>(), expected, "{query}");
    }
    for (agent, expected) in [("test", vec![first.manifest, second.manifest]), ("tes", vec![])] {
        let stats: api::Stats = ok(registry.get(&format!("/v1/stats?agent={agent}")).await).await;
        assert_eq!((stats.repository, stats.agent.as_deref()), (None, Some(agent)));
        assert_eq!(stats.snapshots.iter().map(|s| s.digest).collect::<Vec<_>>(), expected, "{agent}");
    }
    refused(registry.get(&format!("{base}/stats?below=other")).await, ErrorCode::TagUnknown).await;
    for wrong in ["below=a b", "agent=", "agents=test"] {
        for path in [&format!("{base}/stats"), "/v1/stats"] {
            refused(registry.get(&format!("{path}?{wrong}")).await, ErrorCode::InvalidRequest).await;
        }
    }

    let one = freed(&registry, &[second.manifest]).await;
    let both = freed(&registry, &[first.manifest, second.manifest, Digest::sha256(b"absent")]).await;
    let stats: api::Stats = ok(registry.get(&format!("{base}/stats")).await).await;
    assert_eq!((one.snapshots, one.bytes), (1, stats.snapshots[1].exclusive));
    assert_eq!((both.snapshots, both.bytes, both.stored_bytes), (2, stats.unique, stats.stored), "nothing else holds them");

    refused(registry.delete(&format!("{base}/snapshots/latest")).await, ErrorCode::InvalidRequest).await;
    assert_eq!(registry.delete(&format!("{base}/snapshots/{}", second.manifest)).await.status(), StatusCode::NO_CONTENT);
    refused(registry.get(&format!("{base}/snapshots/latest")).await, ErrorCode::TagUnknown).await;
    refused(registry.get(&format!("{base}/snapshots/{}", second.manifest)).await, ErrorCode::SnapshotUnknown).await;
}

#[tokio::test]
async fn forks_are_tags_made_all_or_none() {
    let registry = Registry::start().await;
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    let path = format!("/v1/repositories/{REPO}/forks");
    let response = registry.post(&path, &json!({"snapshot": "latest", "count": 3, "prefix": "try"})).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    let forked: api::Forked = ok(response).await;
    assert_eq!(forked.tags.iter().map(|t| t.as_str()).collect::<Vec<_>>(), ["try-1", "try-2", "try-3"]);

    let tags = format!("/v1/repositories/{REPO}/tags");
    registry.delete(&format!("{tags}/try-1")).await;
    refused(registry.post(&path, &json!({"snapshot": "latest", "count": 3, "prefix": "try"})).await, ErrorCode::TagMoved).await;
    let list: api::TagList = ok(registry.get(&tags).await).await;
    assert_eq!(list.tags.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["latest", "try-2", "try-3"]);
    let page: api::TagList = ok(registry.get(&format!("{tags}?limit=1&after=latest")).await).await;
    assert_eq!((page.tags[0].name.as_str(), page.next.as_deref()), ("try-2", Some("try-2")));
    for (count, code) in [(0, ErrorCode::InvalidRequest), (10_001, ErrorCode::InvalidRequest)] {
        refused(registry.post(&path, &json!({"snapshot": "latest", "count": count, "prefix": "x"})).await, code).await;
    }
}

#[tokio::test]
async fn an_aborted_session_is_over_and_what_it_brought_can_still_be_used() {
    let registry = Registry::start().await;
    let sample = snapshot(0..2, vec![]);
    let push = registry.open_push(REPO).await;
    let blobs: Vec<_> = sample.of_kind(Kind::Blob).cloned().collect();
    let _: api::FramesStored = ok(registry.put_frames(&push, stream(&blobs)).await).await;
    assert_eq!(registry.delete(&push).await.status(), StatusCode::NO_CONTENT);
    refused(registry.delete(&push).await, ErrorCode::PushUnknown).await;
    let push = registry.open_push(REPO).await;
    let lacking: u64 = missing(&registry, &push, &sample).await.iter().map(|(_, count)| count).sum();
    assert_eq!(lacking, (sample.blobs.len() - blobs.len()) as u64, "uploaded blobs were lost with their session");
}
