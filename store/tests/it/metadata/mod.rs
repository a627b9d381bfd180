//! Behaviour suite of [`Metadata`]: random transactions against a model in memory. Every
//! implementation is added to [`backends`]; where two differ, one of them is wrong.

mod housekeeping;
mod model;
mod ops;
mod transcript;
mod uploads;

use crate::common::{repository, tag};
use model::{LEASE, SNAPSHOTS, Universe, frames_of};
use ops::{Op, op, run};
use pfr_schema::codec::Codec;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_store::{Clock, Commit, Metadata, NewFrame, PackSizes, PostgresMetadata, PostgresOptions, PushId, SqliteMetadata, TagMove};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

async fn backends(clock: Clock, dir: &std::path::Path) -> Vec<(&'static str, Arc<dyn Metadata>)> {
    vec![
        ("sqlite in memory", SqliteMetadata::open_in_memory(clock.clone()).await.unwrap()),
        ("sqlite on disk", SqliteMetadata::open(&dir.join("metadata.sqlite"), clock.clone()).await.unwrap()),
        ("postgres", postgres(clock).await),
    ]
}

/// An empty database: the first one of this thread, emptied.
async fn postgres(clock: Clock) -> Arc<dyn Metadata> {
    thread_local!(static URL: std::cell::OnceCell<String> = const { std::cell::OnceCell::new() });
    let url = URL.with(|url| url.get_or_init(pfr_testkit::postgres::database).clone());
    let metadata =
        PostgresMetadata::connect(&url, PostgresOptions { max_connections: 4, clock: Some(clock), ..PostgresOptions::default() })
            .await
            .unwrap();
    pfr_testkit::postgres::empty(&url, "_sqlx_migrations");
    metadata
}

/// Runs the same transactions on every implementation and compares what they say with the model and
/// with each other.
fn leave_the_state_of_the_model(ops: &[Op]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let now = Arc::new(AtomicU64::new(0));
        let clock = {
            let now = Arc::clone(&now);
            Clock::new(move || now.load(Ordering::SeqCst))
        };
        let mut said: Vec<Vec<String>> = Vec::new();
        for (name, backend) in backends(clock, dir.path()).await {
            println!("{name}");
            now.store(1_000_000, Ordering::SeqCst);
            said.push(run(&*backend, ops, &now).await);
        }
        for (first, other) in said[0].iter().zip(&said[2]) {
            assert!(first == other, "SQLite says\n{first}\nPostgreSQL says\n{other}");
        }
        assert_eq!(said[0], said[1], "in memory and on disk");
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_transactions_leaves_the_state_that_the_model_has(ops in proptest::collection::vec(op(), 1..60)) {
        leave_the_state_of_the_model(&ops);
    }
}

mod long {
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

        #[test]
        fn any_sequence_of_transactions_leaves_the_state_that_the_model_has(ops in proptest::collection::vec(op(), 1..60)) {
            leave_the_state_of_the_model(&ops);
        }
    }
}

#[tokio::test]
async fn lists_come_in_pages_that_join_without_gaps() {
    let dir = tempfile::tempdir().unwrap();
    for (name, metadata) in backends(Clock::system(), dir.path()).await {
        let universe = Universe::new();
        let pack = metadata.begin_pack("pack".into(), LEASE).await.unwrap();
        let push = PushId("p".into());
        metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
        let frames = universe.0.iter().flat_map(|blobs| frames_of(blobs, u32::MAX).0).map(|(_, f)| f).collect();
        metadata.finish_pack(push, pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames, LEASE).await.unwrap();
        for snapshot in 0..SNAPSHOTS {
            let push = PushId(format!("p{snapshot}"));
            metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
            let commit = Commit {
                manifest: universe.manifest(snapshot),
                parents: vec![],
                artifact_type: None,
                subject: None,
                tag: Some(TagMove { tag: tag(&format!("tag-{snapshot}")), expected: None }),
                pin: None,
                marks: vec![],
                agent: None,
                audit: None,
                signed: None,
            };
            metadata.commit(push, commit).await.unwrap();
        }
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = metadata.snapshots(repository(), after, 2).await.unwrap();
            all.extend(page.rows.into_iter().map(|r| r.digest));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let newest_first: Vec<Digest> = (0..SNAPSHOTS).rev().map(|i| universe.manifest(i)).collect();
        assert_eq!(all, newest_first, "{name}");
        let first = metadata.tags(repository(), None, 3).await.unwrap();
        assert_eq!(first.next.as_deref(), Some("tag-2"), "{name}");
        assert_eq!(metadata.tags(repository(), first.next, 3).await.unwrap().rows.len(), 2, "{name}");
        assert_eq!(metadata.snapshots(repository(), Some("x".into()), 2).await.unwrap_err().code(), ErrorCode::InvalidRequest);
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused_alike_and_a_list_without_limit_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    for (name, metadata) in backends(Clock::system(), dir.path()).await {
        let universe = Universe::new();
        let push = PushId("p".into());
        metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
        let twice = metadata.open_push(push.clone(), repository(), LEASE).await.unwrap_err();
        assert_eq!(twice.code(), ErrorCode::Internal, "{name}: a session's id is given twice: {twice}");
        let pack = metadata.begin_pack("pack".into(), LEASE).await.unwrap();
        let twice = metadata.begin_pack("pack".into(), LEASE).await.unwrap_err();
        assert_eq!(twice.code(), ErrorCode::Internal, "{name}: a pack's key is given twice: {twice}");
        let frames = universe.0.iter().flat_map(|blobs| frames_of(blobs, u32::MAX).0).map(|(_, f)| f).collect();
        metadata.finish_pack(push.clone(), pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames, LEASE).await.unwrap();
        let commit = |artifact_type: Option<&str>| Commit {
            manifest: universe.manifest(0),
            parents: vec![],
            artifact_type: artifact_type.map(Into::into),
            subject: None,
            tag: Some(TagMove { tag: tag("t"), expected: None }),
            pin: None,
            marks: vec![],
            agent: None,
            audit: None,
            signed: None,
        };
        // Texts that one of the databases cannot keep.
        for artifact_type in ["a\0b", &"a".repeat(256)] {
            let refused = metadata.commit(push.clone(), commit(Some(artifact_type))).await.unwrap_err();
            assert_eq!(refused.code(), ErrorCode::InvalidRequest, "{name}: {refused}");
        }
        metadata.commit(push, commit(Some("a/b"))).await.unwrap();
        let nul = || Some("\0".to_owned());
        let refused = [
            metadata.tags(repository(), nul(), 1).await.map(drop),
            metadata.repositories(nul(), 1).await.map(drop),
            metadata.gc_runs(nul(), 1).await.map(drop),
            metadata.snapshots(repository(), nul(), 1).await.map(drop),
            metadata.damaged(nul(), 1).await.map(drop),
        ];
        for (list, refused) in refused.into_iter().enumerate() {
            assert_eq!(refused.unwrap_err().code(), ErrorCode::InvalidRequest, "{name}, list {list}");
        }
        let nobody = PushId("\0".into());
        assert_eq!(metadata.renew_push(nobody.clone(), LEASE).await.unwrap_err().code(), ErrorCode::PushUnknown, "{name}");
        assert_eq!(metadata.commit(nobody.clone(), commit(None)).await.unwrap_err().code(), ErrorCode::PushUnknown, "{name}");
        metadata.close_push(nobody).await.unwrap();
        // Any number is a limit.
        let all = usize::MAX;
        assert_eq!(metadata.tags(repository(), None, all).await.unwrap().rows.len(), 1, "{name}");
        assert_eq!(metadata.snapshots(repository(), None, all).await.unwrap().rows.len(), 1, "{name}");
        assert_eq!(metadata.repositories(None, all).await.unwrap().rows.len(), 1, "{name}");
        assert_eq!(metadata.packs(None, all).await.unwrap().len(), 1, "{name}");
        assert_eq!(metadata.evictable(all).await.unwrap().len(), 1, "{name}");
        assert_eq!(metadata.unjournaled(all).await.unwrap().len(), 2, "{name}");
        assert_eq!(metadata.gc_runs(None, all).await.unwrap().rows.len(), 0, "{name}");
        assert_eq!(metadata.damaged(None, all).await.unwrap().rows.len(), 0, "{name}");
        assert_eq!(metadata.candidates(all).await.unwrap().len(), 1, "{name}: the pack of a session that ended is due");
        assert_eq!(metadata.queue(false, all).await.unwrap().len(), 1, "{name}");
        assert_eq!(metadata.unfinished(all).await.unwrap().len(), 0, "{name}");
        assert_eq!(metadata.empty_packs(all).await.unwrap(), pfr_store::Emptied::default(), "{name}");
        assert_eq!(metadata.claim_sparse_packs(all, LEASE).await.unwrap().len(), 0, "{name}");
        assert_eq!(metadata.emptied_packs(LEASE, all).await.unwrap().len(), 0, "{name}");
    }
}

#[tokio::test]
async fn of_a_large_request_each_position_is_answered_and_all_that_is_there_is_leased() {
    const STORED: u64 = 9000;
    /// Numbers of blobs that are asked for; those from [`STORED`] on are nowhere.
    const ASKED: u64 = 10_500;
    const HOUR: Duration = Duration::from_secs(3600);
    let dir = tempfile::tempdir().unwrap();
    let digest = |number: u64| Digest::sha256(&number.to_le_bytes());
    let frame = |number: u64| {
        let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: digest(number), raw_len: 8, stored_len: 8 };
        NewFrame { header, offset: 8 + number * 100, container: None }
    };
    // Scattered, some of them twice, and each tenth as a node, which none of them is.
    let asked: Vec<(u64, Kind)> = (0..12_000).map(|i| (i * 11 % ASKED, if i % 10 == 0 { Kind::Run } else { Kind::Blob })).collect();
    let is_there = |(number, kind): &(u64, Kind)| *number < STORED && *kind == Kind::Blob;
    let lacking: Vec<usize> = (0..asked.len()).filter(|&position| !is_there(&asked[position])).collect();
    let leased: BTreeSet<u64> = asked.iter().filter(|one| is_there(one)).map(|(number, _)| *number).collect();
    for (name, metadata) in backends(Clock::system(), dir.path()).await {
        let (storing, asking) = (PushId("storing".into()), PushId("asking".into()));
        metadata.open_push(storing.clone(), repository(), HOUR).await.unwrap();
        metadata.open_push(asking.clone(), repository(), HOUR).await.unwrap();
        let pack = metadata.begin_pack("pack".into(), HOUR).await.unwrap();
        let sizes = PackSizes { bytes: 1 << 20, frame_bytes: 1 << 20 };
        metadata.finish_pack(storing.clone(), pack, sizes, (0..STORED).map(frame).collect(), HOUR).await.unwrap();
        for _ in 0..2 {
            let wanted = asked.iter().map(|(number, kind)| (digest(*number), *kind)).collect();
            assert_eq!(metadata.missing(asking.clone(), wanted, HOUR).await.unwrap(), lacking, "{name}");
        }
        metadata.close_push(storing).await.unwrap();
        while metadata.collect(100_000).await.unwrap().more {}
        let found = metadata.find((0..STORED).map(digest).collect()).await.unwrap();
        let kept: BTreeSet<u64> = (0..STORED).filter(|&number| found[number as usize].is_some()).collect();
        assert!(kept == leased, "{name}: {} blobs are kept, {} are leased", kept.len(), leased.len());
    }
}
