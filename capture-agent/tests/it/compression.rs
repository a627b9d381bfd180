//! Captures under each setting: what is encoded follows from the types that the engine says, and
//! the same state comes back.

use crate::common::engine::Synthetic;
use crate::common::host_with;
use crate::common::layout::{Group, Spec};
use futures::TryStreamExt as _;
use pfr_schema::agent::{Push, RestoreRequest, SnapshotRequest};
use pfr_schema::checkpoint::{Checkpoint, Dtype};
use pfr_schema::codec::{Codec, Compression};
use pfr_schema::frame::{Event, Parser};
use pfr_schema::run::Run;
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, Limits, media_type};
use pfr_store::Store;
use std::collections::{BTreeMap, BTreeSet};

/// Groups whose types are known in each way, or not at all.
fn spec(name: &str) -> Spec {
    let typed = |elements, group| Group { elements: Some(elements), token_bytes: 512, ..group };
    let groups = vec![
        typed(Dtype::Bf16, Group::flat("flat")),
        typed(Dtype::Bf16, Group::opaque("opaque-bf16")),
        typed(Dtype::F16, Group::opaque("opaque-f16")),
        typed(Dtype::F32, Group::opaque("opaque-f32")),
        Group::opaque("unknown"),
        Group::recurrent("mamba", &[("layers.1.conv", 24), ("layers.1.ssm", 100)]),
    ];
    Spec::with(name, groups)
}

/// The codecs of blobs in a store.
async fn codecs(store: &Store, digests: Vec<Digest>) -> BTreeSet<&'static str> {
    let pieces: Vec<bytes::Bytes> = store.frames(digests).await.unwrap().try_collect().await.unwrap();
    let mut parser = Parser::new(Limits::default());
    pieces.into_iter().for_each(|piece| parser.push(piece));
    let mut found = BTreeSet::new();
    while let Some(event) = parser.next().unwrap() {
        if let Event::Begin(header) = event {
            found.insert(header.codec.name());
        }
    }
    found
}

/// The codecs of full pages of each group, and of the state tensors.
async fn by_group(store: &Store, snapshot: &Digest) -> BTreeMap<String, BTreeSet<&'static str>> {
    let (manifest, limits) = (store.manifest(snapshot).await.unwrap(), Limits::default());
    let mut found = BTreeMap::new();
    for layer in manifest.layers_of(media_type::TREE) {
        let tree = PageTree::parse(&store.read(&layer.digest).await.unwrap(), &limits).unwrap();
        let mut digests = Vec::new();
        for run in &tree.runs {
            digests.extend_from_slice(Run::parse(&store.read(&run.digest).await.unwrap(), &limits).unwrap().digests());
        }
        found.insert(tree.group.name, codecs(store, digests).await);
    }
    for layer in manifest.layers_of(media_type::CHECKPOINT) {
        let checkpoint = Checkpoint::parse(&store.read(&layer.digest).await.unwrap(), &limits).unwrap();
        found.insert("states".into(), codecs(store, checkpoint.tensors.iter().map(|tensor| tensor.payload_hash).collect()).await);
    }
    found
}

#[tokio::test]
async fn pages_are_encoded_by_the_type_of_their_group_and_restored_bit_for_bit() {
    let mut snapshots = BTreeSet::new();
    for compression in Compression::ALL {
        let host = host_with(|config| config.compression = compression).await;
        let a = Synthetic::start(&host.agent, spec("a"));
        let b = Synthetic::start(&host.agent, spec("b").placed(7, 64));
        // Whole pages only: in the others, zeros are left out in any case.
        a.add("s", &(0..41).collect::<Vec<u32>>());
        let request = SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() };
        let report = host.agent.snapshot("a", request).await.unwrap();
        assert_eq!(report.boundary % 4, 0);
        let found = by_group(host.agent.store(), &report.digest).await;
        for (group, elements) in [
            ("flat", Some(Dtype::Bf16)),
            ("opaque-bf16", Some(Dtype::Bf16)),
            ("opaque-f16", Some(Dtype::F16)),
            ("opaque-f32", Some(Dtype::F32)),
            ("unknown", None),
            ("states", Some(Dtype::F32)),
        ] {
            let expected = elements.and_then(|elements| compression.codec(elements)).unwrap_or(Codec::Raw);
            assert_eq!(found[group], BTreeSet::from([expected.name()]), "{compression} {group}");
        }
        match compression {
            Compression::Off => assert_eq!(report.bytes_stored, report.bytes_new),
            _ => assert!(report.bytes_stored * 100 < report.bytes_new * 90, "{} of {}", report.bytes_stored, report.bytes_new),
        }
        host.agent.store().verify(&report.digest, &mut |_| {}).await.unwrap();
        let request = RestoreRequest { reference: "team/agent:now".into(), local: true, ..RestoreRequest::default() };
        let restored = host.agent.restore("b", request).await.unwrap();
        assert_eq!(a.content("s"), b.content(&restored.sequence.unwrap()));
        // The time of a capture is in its configuration.
        let manifest = host.agent.store().manifest(&report.digest).await.unwrap();
        snapshots.insert(manifest.layers.iter().map(|layer| layer.digest.to_string()).collect::<Vec<_>>());
    }
    assert_eq!(snapshots.len(), 1, "the encoding is no part of the state");
}

#[tokio::test]
async fn pages_that_are_mostly_zeros_are_stored_without_them_under_every_setting() {
    for compression in Compression::ALL {
        let host = host_with(|config| config.compression = compression).await;
        let engine = Synthetic::start(&host.agent, Spec::with("e", vec![Group { token_bytes: 4096, ..Group::opaque("index") }]));
        // One token of the last page is there.
        engine.add("s", &(0..6).collect::<Vec<u32>>());
        let request = SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() };
        let report = host.agent.snapshot("e", request).await.unwrap();
        let (page, token) = (3 * 4 * 4096, 3 * 4096);
        assert_eq!((report.pages, report.bytes_new), (2, 2 * page));
        assert!((page + token..page + token + 200).contains(&report.bytes_stored), "{compression}: {}", report.bytes_stored);
    }
}
