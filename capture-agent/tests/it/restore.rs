//! Restores into synthetic engines: equal state comes back; state that is not proven equal is
//! refused and changes nothing.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::{Event, Fault};
use crate::common::{Host, capture, host, host_with, restore, tokens, until};
use pfr_schema::agent::{Push, RestoreRequest, SnapshotRequest};
use pfr_schema::checkpoint::{Checkpoint, Dtype};
use pfr_schema::engine::{Oracle, Verb};
use pfr_schema::frame::end_mark;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, media_type, prefix};
use pfr_store::Pin;
use serde_json::json;
use std::convert::Infallible;
use std::time::{Duration, Instant};

/// A snapshot's documents, to be changed.
struct Forged {
    config: SnapshotConfig,
    trees: Vec<PageTree>,
    checkpoints: Vec<Checkpoint>,
    tokens: Vec<u32>,
    oracle: Oracle,
}

impl Forged {
    async fn of(host: &Host, digest: &Digest) -> Self {
        let (store, limits) = (host.agent.store(), Limits::default());
        let manifest = store.manifest(digest).await.unwrap();
        let config = SnapshotConfig::parse(&store.read(&manifest.config.digest).await.unwrap(), &limits).unwrap();
        let (mut trees, mut checkpoints, mut tokens, mut oracle) = (Vec::new(), Vec::new(), Vec::new(), Oracle::default());
        for layer in &manifest.layers {
            let bytes = store.read(&layer.digest).await.unwrap();
            match layer.media_type.as_str() {
                media_type::TREE => trees.push(PageTree::parse(&bytes, &limits).unwrap()),
                media_type::CHECKPOINT => checkpoints.push(Checkpoint::parse(&bytes, &limits).unwrap()),
                media_type::TOKENS => tokens = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect(),
                _ => oracle = serde_json::from_slice(&bytes).unwrap(),
            }
        }
        Self { config, trees, checkpoints, tokens, oracle }
    }

    /// Says another boundary, coherently.
    fn rekey(&mut self, boundary: u64) {
        self.config.boundary = Some(boundary);
        let key = self.config.prefix.as_mut().unwrap();
        key.tokens = boundary;
        let computed = &self.tokens[..boundary as usize];
        key.prefix = prefix::key(&self.config.fingerprint.unwrap(), &key.salt, key.adapter.as_deref(), computed);
        self.same_key();
    }

    fn same_key(&mut self) {
        for checkpoint in &mut self.checkpoints {
            checkpoint.key = self.config.prefix.clone().unwrap();
        }
    }

    /// Stores it under a tag.
    async fn commit(self, host: &Host, tag: &str) {
        let mut documents = Vec::new();
        let mut layers = Vec::new();
        let mut layer = |media_type: &str, document: Document| {
            layers.push(Descriptor::of(media_type, &document));
            documents.push(document);
        };
        self.trees.iter().for_each(|tree| layer(media_type::TREE, tree.to_document()));
        self.checkpoints.iter().for_each(|c| layer(media_type::CHECKPOINT, Document::new(Kind::Checkpoint, c.to_bytes())));
        let bytes = self.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        layer(media_type::TOKENS, Document::new(Kind::Blob, bytes));
        layer(media_type::ORACLE, Document::new(Kind::Blob, serde_json::to_vec(&self.oracle).unwrap()));
        let config = Document::new(Kind::Blob, self.config.to_bytes());
        let manifest = Manifest::snapshot(&config, layers, Default::default()).to_document();
        let digest = manifest.digest;
        documents.extend([config, manifest]);
        let store = host.agent.store();
        let session = store.open_push(&"team/agent".parse().unwrap()).await.unwrap();
        let mut frames: Vec<bytes::Bytes> = documents.iter().map(pfr_store::document_frame).collect();
        frames.push(end_mark(frames.len() as u64).into());
        store.ingest(&session.id, futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>))).await.unwrap();
        store.commit(&session.id, digest, Some(tag.parse().unwrap()), None).await.unwrap();
    }
}

#[tokio::test]
async fn equal_state_lies_elsewhere_and_runs_on_alike() {
    let host = host().await;
    for (number, (name, world)) in [("e", 1), ("two", 2)].into_iter().enumerate() {
        let mut spec = Spec::hybrid(name).ranks(world);
        spec.groups.push(Group { replicated: true, ..Group::opaque("shared") });
        let a = Synthetic::start(&host.agent, spec.clone());
        let mut there = spec.placed(7, 64);
        there.name = format!("{name}-there");
        let b = Synthetic::start(&host.agent, there.clone());
        a.add_with("s", &tokens(62 + number as u32), |s| s.salt = "tenant".into());
        b.add("other", &tokens(17));
        let digest = capture(&host, name, "now").await;
        let report = restore(&host, &there.name, "now").await.unwrap();
        let restored = report.sequence.clone().unwrap();
        assert_eq!((report.digest, report.oracle, report.values_computed, report.values_attested), (digest, true, 2 * u64::from(world), 0));
        assert_eq!(a.content("s"), b.content(&restored));
        assert_eq!(b.sequence(&restored).salt, "tenant");
        assert_eq!(host.agent.engines().get(&there.name).unwrap().parent(&restored), Some(digest));
        a.step("s", 9);
        b.step(&restored, 9);
        assert_eq!((a.sequence("s").tokens, a.content("s")), (b.sequence(&restored).tokens, b.content(&restored)));
    }
}

#[tokio::test]
async fn what_is_restored_is_the_last_to_be_evicted() {
    let host = host().await;
    let spec = Spec::flat("e");
    let a = Synthetic::start(&host.agent, spec.clone());
    let mut there = spec.placed(7, 64);
    there.name = "there".into();
    let _b = Synthetic::start(&host.agent, there.clone());
    a.add("s", &tokens(20));
    let mut captured = Vec::new();
    for name in ["one", "two"] {
        let request = SnapshotRequest { reference: format!("team/agent:{name}"), push: Push::Never, ..SnapshotRequest::default() };
        let digest = host.agent.snapshot("e", request).await.unwrap().digest;
        host.agent.store().pin(&"team/agent".parse().unwrap(), &digest, Pin::UntilPushed, false).await.unwrap();
        captured.push(digest);
        a.step("s", 5);
    }
    let order = async || host.agent.store().metadata().evictable(10).await.unwrap().into_iter().map(|s| s.digest).collect::<Vec<_>>();
    assert_eq!(order().await, captured);
    restore(&host, "there", "one").await.unwrap();
    captured.reverse();
    assert_eq!(order().await, captured);
}

type Change = fn(&mut Forged);

/// What a snapshot may say that is not so, and what it is called.
const FORGERIES: &[(&str, Change, ErrorCode)] = &[
    ("a state is left out", |f| drop(f.checkpoints[0].tensors.pop()), ErrorCode::MissingState),
    ("all state is left out", |f| f.checkpoints.clear(), ErrorCode::MissingState),
    ("a state has another name", |f| f.checkpoints[0].tensors[0].name = "layers.9.conv".into(), ErrorCode::MissingState),
    ("a group is left out", |f| drop(f.trees.remove(0)), ErrorCode::MissingGroup),
    ("a group has another name", |f| f.trees[0].group.name = "other".into(), ErrorCode::MissingGroup),
    ("boundary − 1, within the page", |f| f.rekey(61), ErrorCode::BoundaryMismatch),
    ("boundary − 2, a page less", |f| f.rekey(60), ErrorCode::PageCountMismatch),
    ("boundary + 1, within the page", |f| f.rekey(63), ErrorCode::BoundaryMismatch),
    ("fewer tokens than the boundary", |f| f.tokens.truncate(60), ErrorCode::BoundaryMismatch),
    ("no boundary", |f| f.config.boundary = None, ErrorCode::InvalidDocument),
    ("fill of the last page", |f| f.trees[0].sequences[0].fill = 3, ErrorCode::BoundaryMismatch),
    ("a page less", |f| f.trees[2].sequences[0].ix = f.trees[2].ix.iter().skip(1).collect(), ErrorCode::PageCountMismatch),
    (
        "columns shifted",
        |f| {
            let shifted: pfr_schema::ranges::Ranges = f.trees[0].ix.iter().map(|ix| ix + 1).collect();
            (f.trees[0].ix, f.trees[0].sequences[0].ix) = (shifted.clone(), shifted);
        },
        ErrorCode::BoundaryMismatch,
    ),
    (
        "another salt",
        |f| {
            f.config.prefix.as_mut().unwrap().salt = "other".into();
            f.same_key();
        },
        ErrorCode::PrefixMismatch,
    ),
    (
        "an adapter",
        |f| {
            f.config.prefix.as_mut().unwrap().adapter = Some("lora".into());
            f.same_key();
        },
        ErrorCode::PrefixMismatch,
    ),
    ("another token", |f| f.tokens[30] += 1, ErrorCode::PrefixMismatch),
    ("another fingerprint", |f| f.config.fingerprint = Some(Digest::sha256(b"x")), ErrorCode::FingerprintMismatch),
    ("other weights", |f| drop(f.config.deployment.insert("weights".into(), json!("sha256:x"))), ErrorCode::FingerprintMismatch),
    ("more ranks", |f| f.trees.iter_mut().for_each(|tree| tree.world = 2), ErrorCode::RankMismatch),
    ("another layout", |f| f.trees[0].layout = "opaque/synthetic/reference/v2".into(), ErrorCode::GeometryMismatch),
    ("another kind", |f| f.trees[0].group.kind = GroupKind::Mla, ErrorCode::GeometryMismatch),
    ("other components", |f| f.trees[0].components = vec!["latent".into()], ErrorCode::GeometryMismatch),
    ("a state of another shape", |f| f.checkpoints[0].tensors[0].shape = vec![12], ErrorCode::GeometryMismatch),
    ("a state of another logical type", |f| f.checkpoints[0].tensors[0].logical_dtype = Dtype::I32, ErrorCode::GeometryMismatch),
    ("a state of another kind", |f| f.checkpoints[0].tensors[0].kind = "conv".into(), ErrorCode::GeometryMismatch),
    (
        "a value that was not captured",
        |f| f.checkpoints[0].tensors[0].value_hash = f.checkpoints[0].tensors[1].value_hash,
        ErrorCode::ValueHashMismatch,
    ),
];

#[tokio::test]
async fn what_does_not_fit_is_refused_before_anything_is_allocated() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(63));
    engine.core.add("t", &tokens(20));
    let request =
        SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, sequence: Some("s".into()), ..SnapshotRequest::default() };
    let report = host.agent.snapshot("e", request).await.unwrap();
    let (before, free) = (engine.content("t"), engine.free_blocks("main"));
    for (number, (what, change, code)) in FORGERIES.iter().enumerate() {
        let mut forged = Forged::of(&host, &report.digest).await;
        assert_eq!(forged.config.boundary, Some(62));
        change(&mut forged);
        let tag = format!("forged-{number}");
        forged.commit(&host, &tag).await;
        engine.forget_journal();
        let error = restore(&host, "e", &tag).await.unwrap_err();
        assert_eq!(error.code(), *code, "{what}: {error}");
        assert_eq!(engine.journal(), [], "{what}: the engine was touched");
    }
    assert_eq!((engine.content("t"), engine.free_blocks("main")), (before, free));
    // And what was not forged is taken.
    restore(&host, "e", "now").await.unwrap();
}

#[tokio::test]
async fn other_engines_are_refused() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e", "now").await;
    let other = |name: &str| Spec::hybrid(name);
    let with = |name: &str, key: &str, value| {
        let mut spec = other(name);
        spec.deployment.insert(key.into(), value);
        spec
    };
    let mut window = other("window");
    window.groups[2].window = Some(11 + 4);
    let mut blocks = other("blocks");
    blocks.groups[1].block_tokens = 8;
    let mut wide = other("wide");
    wide.groups[1].token_bytes = 32;
    let mut draft = other("draft");
    draft.groups.push(Group::opaque("draft"));
    for (spec, code) in [
        (with("weights", "weights", json!("sha256:x")), ErrorCode::FingerprintMismatch),
        (with("backend", "backend", json!("other")), ErrorCode::FingerprintMismatch),
        (with("tp", "tp", json!(2)), ErrorCode::FingerprintMismatch),
        (other("ranks").ranks(2), ErrorCode::RankMismatch),
        (window, ErrorCode::PageCountMismatch),
        (blocks, ErrorCode::GeometryMismatch),
        (wide, ErrorCode::GeometryMismatch),
        (draft, ErrorCode::MissingGroup),
        (Spec::flat("dense"), ErrorCode::MissingGroup),
        (other("captured").without(Verb::Allocate), ErrorCode::EngineBusy),
    ] {
        let name = spec.name.clone();
        let engine = Synthetic::start(&host.agent, spec);
        let error = restore(&host, &name, "now").await.unwrap_err();
        assert_eq!(error.code(), code, "{name}: {error}");
        assert_eq!(engine.journal(), [], "{name}");
    }
    let mut optional = other("optional");
    optional.groups.push(Group { required: false, ..Group::opaque("draft") });
    let _engine = Synthetic::start(&host.agent, optional);
    restore(&host, "optional", "now").await.unwrap();
}

#[tokio::test]
async fn what_goes_wrong_after_blocks_were_taken_gives_them_back() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    let digest = capture(&host, "e", "now").await;
    let (before, free) = (engine.content("s"), engine.free_blocks("main"));
    for (fault, code) in [
        (Fault::WritesLie, ErrorCode::LiveMismatch),
        (Fault::OtherLogits, ErrorCode::OracleMismatch),
        (Fault::HashFails, ErrorCode::EngineLost),
        (Fault::ReadFails, ErrorCode::EngineLost),
        (Fault::PanicInHash, ErrorCode::Internal),
        (Fault::BlockTooFew, ErrorCode::EngineRefused),
        (Fault::NullBlock, ErrorCode::EngineRefused),
        (Fault::BlockOutOfRange, ErrorCode::EngineRefused),
        (Fault::Refuses("oracle"), ErrorCode::EngineRefused),
        (Fault::Refuses("activate"), ErrorCode::EngineRefused),
    ] {
        engine.set(fault);
        engine.forget_journal();
        let error = restore(&host, "e", "now").await.unwrap_err();
        assert_eq!(error.code(), code, "{fault:?}: {error}");
        assert!(engine.waiting().is_empty() && engine.journal().contains(&Event::Call("discard")), "{fault:?}: the blocks are not back");
        engine.heal();
        assert_eq!(engine.sequences(), ["s"], "{fault:?}");
        assert_eq!((engine.content("s"), engine.free_blocks("main")), (before.clone(), free), "{fault:?}");
    }
    // A logit that differs from the recorded one.
    let mut forged = Forged::of(&host, &digest).await;
    forged.oracle.top[0].1 ^= 1;
    forged.commit(&host, "logits").await;
    assert_eq!(restore(&host, "e", "logits").await.unwrap_err().code(), ErrorCode::OracleMismatch);
    assert!(engine.waiting().is_empty(), "the blocks are not back");
    restore(&host, "e", "now").await.unwrap();
}

#[tokio::test]
async fn an_engine_that_answers_nothing_is_waited_for_once() {
    let limit = Duration::from_secs(2);
    let host = host_with(|config| config.engine_timeout = limit).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e", "now").await;
    engine.set(Fault::Silent("activate"));
    engine.set(Fault::Silent("discard"));
    let start = Instant::now();
    let error = restore(&host, "e", "now").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::EngineLost, "{error}");
    assert!(start.elapsed() < 2 * limit, "it waits for the answer to a second call: {:?}", start.elapsed());
    engine.heal();
    until("the blocks are back", || engine.waiting().is_empty()).await;
}

#[tokio::test]
async fn a_damaged_store_is_found() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e", "now").await;
    let free = engine.free_blocks("main");
    let packs = host.dir.path().join("store/packs");
    let largest = std::fs::read_dir(&packs).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<std::path::PathBuf> = largest.collect();
    while let Some(dir) = files.iter().position(|path| path.is_dir()) {
        let dir = files.swap_remove(dir);
        files.extend(std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()));
    }
    let pack = files.into_iter().max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = std::fs::read(&pack).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let error = restore(&host, "e", "now").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptStore, "{error}");
    until("the blocks are back", || engine.waiting().is_empty() && engine.free_blocks("main") == free).await;
}

#[tokio::test]
async fn a_snapshot_of_full_attention_comes_back_at_the_end_of_each_page() {
    let host = host().await;
    let a = Synthetic::start(&host.agent, Spec::attention("e").ranks(2));
    a.add("s", &tokens(62));
    let digest = capture(&host, "e", "now").await;
    let mut spec = Spec::attention("there").ranks(2).placed(7, 64);
    spec.groups.iter_mut().for_each(|group| group.blocks = 200);
    let b = Synthetic::start(&host.agent, spec);
    let restore_at = async |engine: &str, position| {
        let reference = "team/agent:now".to_owned();
        host.agent.restore(engine, RestoreRequest { reference, local: true, position: Some(position), ..RestoreRequest::default() }).await
    };
    for position in [8, 32, 56] {
        let report = restore_at("there", position).await.unwrap();
        assert_eq!((report.digest, report.boundary, report.tokens, report.oracle), (digest, position, position + 1, false));
        assert!(report.partly, "at {position}");
        let (restored, own) = (report.sequence.unwrap(), format!("own-{position}"));
        b.add(&own, &tokens(position as u32 + 1));
        assert_eq!(b.content(&restored), b.content(&own), "at {position}");
        b.step(&restored, 9);
        b.step(&own, 9);
        assert_eq!((b.sequence(&restored).tokens, b.content(&restored)), (b.sequence(&own).tokens, b.content(&own)));
    }
    let whole = restore_at("there", 61).await.unwrap();
    assert_eq!((b.content(&whole.sequence.unwrap()), whole.oracle), (a.content("s"), true));
    // In the middle of a page of one group, and beyond the end.
    for position in [0, 4, 44, 60, 62] {
        let error = restore_at("there", position).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::BoundaryMismatch, "{error}");
        let possible = "a resume begins at token position 61, the end of the snapshot, or at a multiple of 8 before it";
        assert_eq!(error.to_string(), format!("{possible}, not at {position}"));
    }
    assert_eq!(b.waiting(), Vec::<String>::new());

    let c = Synthetic::start(&host.agent, Spec::hybrid("hybrid"));
    c.add("s", &tokens(62));
    capture(&host, "hybrid", "now").await;
    let error = restore_at("hybrid", 32).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::BoundaryMismatch, "{error}");
    assert_eq!(error.to_string(), "a resume begins at token position 61, the end of the snapshot, not at 32");
}

#[tokio::test]
async fn blocks_are_not_given_back_under_a_copy() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e", "now").await;
    engine.forget_journal();
    engine.watch.hold_writes();
    let agent = host.agent.clone();
    let request = RestoreRequest { reference: "team/agent:now".into(), local: true, ..RestoreRequest::default() };
    let restoring = tokio::spawn(async move { agent.restore("e", request).await });
    until("it writes", || engine.watch.is_writing()).await;
    // The caller disconnects.
    restoring.abort();
    assert!(restoring.await.unwrap_err().is_cancelled());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(engine.waiting().len(), 1);
    engine.watch.release_writes();
    until("the blocks are back", || engine.waiting().is_empty()).await;
    assert!(engine.journal().contains(&Event::Call("discard")), "{:?}", engine.journal());
    restore(&host, "e", "now").await.unwrap();
}
