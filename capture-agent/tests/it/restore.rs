//! Restores into synthetic engines: equal state comes back; state that is not proven equal is
//! refused and changes nothing.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::{Event, Fault};
use crate::common::{Host, host, until};
use pfr_agent::engines::Answers as _;
use pfr_schema::agent::{Push, RestoreReport, RestoreRequest, SnapshotRequest};
use pfr_schema::checkpoint::{Checkpoint, Dtype};
use pfr_schema::engine::{Abandon, Fill, Match, MatchKeys, Matched, Oracle, Outcome, Report, Taking, ToAgent, Verb};
use pfr_schema::frame::end_mark;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, media_type, prefix};
use pfr_store::Pin;
use serde_json::json;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|i| i * 7 + 3).collect()
}

async fn capture(host: &Host, engine: &str) -> Digest {
    let request = SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() };
    host.agent.snapshot(engine, request).await.unwrap().digest
}

async fn restore(host: &Host, engine: &str, tag: &str) -> pfr_agent::Result<RestoreReport> {
    let request = RestoreRequest { reference: format!("team/agent:{tag}"), local: true, ..RestoreRequest::default() };
    host.agent.restore(engine, request).await
}

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
        let digest = capture(&host, name).await;
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
    capture(&host, "e").await;
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
    let digest = capture(&host, "e").await;
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
        until("the blocks are back", || engine.waiting().is_empty() && engine.journal().contains(&Event::Call("discard"))).await;
        engine.heal();
        assert_eq!(engine.sequences(), ["s"], "{fault:?}");
        assert_eq!((engine.content("s"), engine.free_blocks("main")), (before.clone(), free), "{fault:?}");
    }
    // A logit that differs from the recorded one.
    let mut forged = Forged::of(&host, &digest).await;
    forged.oracle.top[0].1 ^= 1;
    forged.commit(&host, "logits").await;
    assert_eq!(restore(&host, "e", "logits").await.unwrap_err().code(), ErrorCode::OracleMismatch);
    until("the blocks are back", || engine.waiting().is_empty()).await;
    restore(&host, "e", "now").await.unwrap();
}

#[tokio::test]
async fn a_damaged_store_is_found() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e").await;
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
async fn an_engine_that_asks_gets_the_deepest_state_that_fits() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e").await;
    let mut spec = Spec::hybrid("asks").placed(9, 32);
    spec.verbs = vec![Verb::Request];
    let asking = Synthetic::start(&host.agent, spec);
    let handle = host.agent.engines().get("asks").unwrap();
    let ask = async |request: Match| {
        let answer = host.agent.answer(&handle, 0, ToAgent::Match(request)).await.unwrap();
        serde_json::from_value::<Matched>(answer).unwrap()
    };
    let request = || Match { tokens: tokens(62), ..Match::default() };
    assert!(matches!(ask(request()).await, Matched::None { .. }));

    let report = restore(&host, "asks", "now").await.unwrap();
    assert_eq!((report.sequence, report.boundary, report.bytes_written), (None, 61, 0));
    assert_eq!(asking.journal(), []);
    let mut other = request();
    other.tokens[60] += 1;
    for (request, word) in [
        (other, "token 60 differs"),
        (Match { salt: "x".into(), ..request() }, "salt or adapter"),
        (Match { adapter: Some("x".into()), ..request() }, "salt or adapter"),
        (Match { tokens: tokens(61), ..request() }, "no token is left"),
        (Match { tokens: tokens(40), ..request() }, "the request has 40"),
        (Match { computed: 61, ..request() }, "already"),
    ] {
        let Matched::None { reason } = ask(request).await else { panic!("{word}") };
        assert!(reason.contains(word), "{reason}");
    }
    let Matched::Ready { boundary, restore: name, .. } = ask(Match { tokens: tokens(90), computed: 48, ..Match::default() }).await else {
        panic!("nothing ready")
    };
    assert_eq!(boundary, 61);

    // The engine allocates as if the sequence were its own; the content is the first engine's.
    asking.add("mine", &tokens(62));
    let blocks = asking.sequence("mine").blocks;
    let expected = engine.content("s");
    for (group, list) in &blocks {
        assert!(!list.is_empty(), "{group}");
    }
    wipe(&asking);
    assert_ne!(asking.content("mine"), expected);
    let fill = |blocks| ToAgent::Fill(Fill { restore: name.clone(), blocks, after: None, kept: 0, fill: None });
    host.agent.answer(&handle, 0, fill(blocks.clone())).await.unwrap();
    assert_eq!(asking.content("mine"), expected);
    host.agent.answer(&handle, 0, ToAgent::Abandon(Abandon { restore: name.clone(), fill: None })).await.unwrap();

    // Memory that lies: an error, and the state is not offered again.
    asking.set(Fault::WritesLie);
    let error = host.agent.answer(&handle, 0, fill(blocks)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LiveMismatch);
    assert!(matches!(ask(request()).await, Matched::None { .. }));
}

/// Full attention alone, in pages of 4 and of 8 tokens.
fn attention(name: &str) -> Spec {
    Spec::with(name, vec![Group::flat("main"), Group { block_tokens: 8, ..Group::opaque("other") }])
}

#[tokio::test]
async fn a_snapshot_of_full_attention_comes_back_at_the_end_of_each_page() {
    let host = host().await;
    let a = Synthetic::start(&host.agent, attention("e").ranks(2));
    a.add("s", &tokens(62));
    let digest = capture(&host, "e").await;
    let mut spec = attention("there").ranks(2).placed(7, 64);
    spec.groups.iter_mut().for_each(|group| group.blocks = 200);
    let b = Synthetic::start(&host.agent, spec);
    let restore_at = async |engine: &str, position| {
        let reference = "team/agent:now".to_owned();
        host.agent.restore(engine, RestoreRequest { reference, local: true, position: Some(position), ..RestoreRequest::default() }).await
    };
    for position in [8, 32, 56] {
        let report = restore_at("there", position).await.unwrap();
        assert_eq!((report.digest, report.boundary, report.tokens, report.oracle), (digest, position, position + 1, false));
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
    capture(&host, "hybrid").await;
    let error = restore_at("hybrid", 32).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::BoundaryMismatch, "{error}");
    assert_eq!(error.to_string(), "a resume begins at token position 61, the end of the snapshot, not at 32");
}

#[tokio::test]
async fn a_request_takes_the_pages_before_the_token_in_which_it_differs() {
    let host = host().await;
    let source = Synthetic::start(&host.agent, attention("e"));
    source.add("s", &tokens(62));
    let digest = capture(&host, "e").await;
    let mut spec = attention("asks").placed(9, 32);
    spec.verbs = vec![Verb::Request];
    let engine = Synthetic::start(&host.agent, spec);
    restore(&host, "asks", "now").await.unwrap();
    let told = engine.told.lock().last().cloned().unwrap();
    assert_eq!((told.boundaries, told.shortest), (vec![61], Some(8)));
    let handle = host.agent.engines().get("asks").unwrap();
    let call = async |call| host.agent.answer(&handle, 0, call).await;
    let ask = async |request| serde_json::from_value::<Matched>(call(request).await.unwrap()).unwrap();
    let keys = |tokens: &[u32]| {
        let fingerprint = prefix::fingerprint(&engine.spec.deployment);
        let mut keys = prefix::rungs(&fingerprint, "", None, tokens);
        keys.retain(|(at, _)| *at < 61);
        keys.extend((tokens.len() > 61).then(|| (61, prefix::key(&fingerprint, "", None, &tokens[..61]))));
        ToAgent::MatchKeys(MatchKeys { tokens: tokens.len() as u64, keys, ..MatchKeys::default() })
    };

    let mut other = tokens(90);
    other[45] += 1;
    assert_eq!(ask(keys(&other)).await, Matched::Tokens { of: None });
    let request = |tokens: &[u32], computed| ToAgent::Match(Match { tokens: tokens.to_vec(), computed, ..Match::default() });
    let matched = ask(request(&other, 0)).await;
    let Matched::Ready { boundary: 40, restore: name, digest: found, partly: true, tier: None } = matched else { panic!("{matched:?}") };
    assert_eq!(found, digest);
    // A shorter request, one that ends where the state does, one that has all of it, one that has
    // none.
    for (tokens, boundary) in [(tokens(30), 24), (tokens(61), 56), (tokens(62), 61)] {
        let matched = ask(request(&tokens, 0)).await;
        assert!(matches!(matched, Matched::Ready { boundary: at, partly, .. } if at == boundary && partly == (at < 61)), "{matched:?}");
    }
    assert!(matches!(ask(request(&tokens(8), 0)).await, Matched::None { .. }));
    assert!(matches!(ask(request(&other, 40)).await, Matched::None { .. }));
    let of_another = Match { tokens: other.clone(), of: Some(Digest::sha256(b"x")), ..Match::default() };
    assert!(matches!(ask(ToAgent::Match(of_another)).await, Matched::None { .. }));

    // The state that the engine would compute itself.
    engine.add("mine", &other[..41]);
    let (blocks, expected) = (engine.sequence("mine").blocks, engine.content("mine"));
    let fill = |restore: &str, blocks: &BTreeMap<String, Vec<u32>>, kept| {
        ToAgent::Fill(Fill { restore: restore.into(), blocks: blocks.clone(), after: None, kept, fill: None })
    };
    wipe(&engine);
    let filled = call(fill(&name, &blocks, 0)).await.unwrap();
    assert_eq!(filled, json!({}), "no logits were recorded there");
    assert_eq!(engine.content("mine"), expected);
    call(fill(&name, &blocks, 16)).await.unwrap();
    wipe(&engine);
    assert_eq!(call(fill(&name, &blocks, 16)).await.unwrap_err().code(), ErrorCode::KeptDiffers);
    let outcomes = vec![Outcome { restore: Some(name.clone()), what: Taking::Taken, count: 3 }];
    call(ToAgent::Report(Report { outcomes })).await.unwrap();
    assert_eq!(host.agent.staged().info("asks").0[0].outcomes[&Taking::Taken], 3);
    // A position that no match named.
    let forged = name.replace("@40", "@44");
    assert_eq!(call(fill(&forged, &blocks, 0)).await.unwrap_err().code(), ErrorCode::BoundaryMismatch);
}

/// An engine that asks, with a captured snapshot of 61 tokens ready for it: its state is the
/// content of the other engine.
struct Asking {
    host: Host,
    source: Synthetic,
    engine: Synthetic,
    restore: String,
}

impl Asking {
    async fn start() -> Self {
        let host = host().await;
        let source = Synthetic::start(&host.agent, Spec::hybrid("e"));
        source.add("s", &tokens(62));
        capture(&host, "e").await;
        let mut spec = Spec::hybrid("asks").placed(9, 32);
        spec.verbs = vec![Verb::Request];
        let engine = Synthetic::start(&host.agent, spec);
        restore(&host, "asks", "now").await.unwrap();
        let mut asking = Self { host, source, engine, restore: String::new() };
        let matched = asking.ask(asking.keys(&tokens(90))).await;
        let Matched::Ready { boundary: 61, restore, .. } = matched else { panic!("{matched:?}") };
        asking.restore = restore;
        asking
    }

    async fn call(&self, call: ToAgent) -> Result<serde_json::Value, pfr_agent::Error> {
        let handle = self.host.agent.engines().get("asks").unwrap();
        self.host.agent.answer(&handle, 0, call).await
    }

    async fn ask(&self, call: ToAgent) -> Matched {
        serde_json::from_value(self.call(call).await.unwrap()).unwrap()
    }

    /// The question of a request, by the keys at the lengths that the engine was told.
    fn keys(&self, tokens: &[u32]) -> ToAgent {
        let boundaries = self.engine.told.lock().last().map_or(vec![], |states| states.boundaries.clone());
        let fingerprint = pfr_schema::prefix::fingerprint(&self.engine.spec.deployment);
        let lengths = boundaries.into_iter().filter(|at| (*at as usize) < tokens.len());
        let keys = lengths.map(|at| (at, pfr_schema::prefix::key(&fingerprint, "", None, &tokens[..at as usize]))).collect();
        ToAgent::MatchKeys(MatchKeys { tokens: tokens.len() as u64, keys, ..MatchKeys::default() })
    }

    fn fill(&self, blocks: &BTreeMap<String, Vec<u32>>, kept: u64, fill: &str) -> ToAgent {
        ToAgent::Fill(Fill { restore: self.restore.clone(), blocks: blocks.clone(), after: None, kept, fill: Some(fill.into()) })
    }
}

#[tokio::test]
async fn an_engine_knows_what_lies_ready_when_the_restore_returns_and_asks_with_keys() {
    let asking = Asking::start().await;
    let told = asking.engine.told.lock().clone();
    assert_eq!(told.last().map(|states| (states.boundaries.clone(), states.expected)), Some((vec![61], false)));
    assert!(told.windows(2).all(|two| two[0].version <= two[1].version), "{told:?}");
    let mut other = tokens(90);
    other[60] += 1;
    let Matched::None { reason } = asking.ask(asking.keys(&other)).await else { panic!("another token") };
    assert!(reason.contains("does not hold"), "{reason}");
    // Asked before the engine knew.
    let early = ToAgent::MatchKeys(MatchKeys { tokens: 90, ..MatchKeys::default() });
    assert_eq!(asking.ask(early).await, Matched::Later {});
    let twice = (16, pfr_schema::Digest::sha256(b"x"));
    let senseless = ToAgent::MatchKeys(MatchKeys { tokens: 90, keys: vec![twice, twice], ..MatchKeys::default() });
    assert_eq!(asking.call(senseless).await.unwrap_err().code(), ErrorCode::InvalidRequest);

    // States that are not taken are reported and kept.
    let outcome = |restore: Option<&str>, what| Outcome { restore: restore.map(Into::into), what, count: 2 };
    let outcomes = vec![outcome(Some(&asking.restore), Taking::FillLate), outcome(None, Taking::AgentSilent)];
    asking.call(ToAgent::Report(Report { outcomes })).await.unwrap();
    let (staged, unmatched) = asking.host.agent.staged().info("asks");
    assert_eq!((staged[0].boundary, staged[0].ready, staged[0].outcomes[&Taking::FillLate]), (61, true, 2));
    assert_eq!(unmatched[&Taking::AgentSilent], 2);

    // A state whose first step has other logits is not offered again.
    let report = async |what| asking.call(ToAgent::Report(Report { outcomes: vec![outcome(Some(&asking.restore), what)] })).await.unwrap();
    report(Taking::LogitsEqual).await;
    assert_eq!(asking.host.agent.staged().info("asks").0[0].outcomes[&Taking::LogitsEqual], 2);
    report(Taking::LogitsDiffer).await;
    assert_eq!(asking.host.agent.staged().info("asks").0.len(), 0);
}

#[tokio::test]
async fn blocks_that_the_engine_has_are_compared_and_not_written() {
    let asking = Asking::start().await;
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    let restores = || asking.host.agent.engines().list().into_iter().find(|info| info.engine == "asks").unwrap().restores;
    assert_eq!(restores(), 0, "ready is not taken");
    engine.forget_journal();
    let filled = asking.call(asking.fill(&blocks, 32, "a-1")).await.unwrap();
    assert_eq!(filled["oracle"]["boundary"], 61, "the logits of the first step go with it: {filled}");
    assert_eq!(engine.content("mine"), asking.source.content("s"));
    assert_eq!(restores(), 1);
    let written = |journal: Vec<Event>| journal.iter().map(|event| if let Event::Write(pages) = event { *pages } else { 0 }).sum::<usize>();
    let part = written(engine.journal());
    engine.forget_journal();
    asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap();
    let all = written(engine.journal());
    assert!(0 < part && part < all, "{part} of {all} pages written");

    // A page that the engine computed differently: it is not written, and the state stays ready.
    wipe(engine);
    let before = engine.content("mine");
    let error = asking.call(asking.fill(&blocks, 32, "a-3")).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Kept { .. }), "{error}");
    assert_eq!(error.code(), ErrorCode::KeptDiffers);
    let (name, first) = &before[0];
    let after = engine.content("mine");
    let kept = after.iter().filter(|(_, bytes)| bytes.iter().all(|byte| *byte == 0xee)).count();
    assert!(kept > 0, "the engine's own pages are as they were, {name} had {} bytes", first.len());
    assert!(matches!(asking.ask(asking.keys(&tokens(90))).await, Matched::Ready { .. }));
    asking.call(asking.fill(&blocks, 0, "a-4")).await.unwrap();
    assert_eq!(engine.content("mine"), asking.source.content("s"));
    // As many tokens as the state has: there is nothing to fill.
    assert_eq!(asking.call(asking.fill(&blocks, 61, "a-5")).await.unwrap_err().code(), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn an_engine_gets_its_blocks_back_when_no_late_write_can_come() {
    let asking = Arc::new(Asking::start().await);
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    engine.watch.hold_writes();
    let filling = tokio::spawn({
        let (asking, call) = (Arc::clone(&asking), asking.fill(&blocks, 0, "a-1"));
        async move { asking.call(call).await }
    });
    until("it writes", || engine.watch.is_writing()).await;
    let abandon = |fill: &str| ToAgent::Abandon(Abandon { restore: asking.restore.clone(), fill: Some(fill.into()) });
    let giving_up = tokio::spawn({
        let (asking, call) = (Arc::clone(&asking), abandon("a-1"));
        async move { asking.call(call).await }
    });
    // Its gate is closed, and it still waits.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!giving_up.is_finished(), "a write is in flight");
    engine.watch.release_writes();
    giving_up.await.unwrap().unwrap();
    assert!(!engine.watch.is_writing());
    // All of it was one copy, so it may have ended well.
    drop(filling.await.unwrap());

    // Given up before it came: the call may lie in the socket of another rank.
    asking.call(abandon("a-2")).await.unwrap();
    engine.forget_journal();
    let error = asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap_err();
    assert!(error.to_string().contains("gave up"), "{error}");
    assert_eq!(engine.journal(), []);
}

#[tokio::test]
async fn an_agent_that_stops_waits_for_copies_and_begins_no_other() {
    let asking = Arc::new(Asking::start().await);
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    engine.watch.hold_writes();
    let filling = tokio::spawn({
        let (asking, call) = (Arc::clone(&asking), asking.fill(&blocks, 0, "a-1"));
        async move { asking.call(call).await }
    });
    until("it writes", || engine.watch.is_writing()).await;
    let engines = asking.host.agent.engines().clone();
    assert!(!engines.settle(Duration::from_millis(20)).await, "a write is in flight");
    // Neither a fill begins, nor a restore into an engine that takes sequences.
    let error = asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Ended), "{error}");
    let error = restore(&asking.host, "e", "now").await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Ended), "{error}");
    until("its blocks are back", || asking.source.waiting().is_empty()).await;
    let settling = tokio::spawn(async move { engines.settle(Duration::from_secs(20)).await });
    engine.watch.release_writes();
    assert!(settling.await.unwrap(), "the write has ended");
    assert!(!engine.watch.is_writing());
    drop(filling.await.unwrap());
    assert_eq!(asking.host.agent.staged().info("asks").0.len(), 1, "nothing is said against the state");
}

#[tokio::test]
async fn blocks_are_not_given_back_under_a_copy() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e").await;
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

/// An engine that asks.
fn asking(host: &Host, name: &str, weights: &str) -> Synthetic {
    let mut spec = Spec::flat(name);
    spec.verbs = vec![Verb::Request];
    spec.deployment.insert("weights".into(), json!(weights));
    Synthetic::start(&host.agent, spec)
}

/// A host with a snapshot of 29 tokens.
async fn with_snapshot() -> Host {
    let host = host().await;
    let source = Synthetic::start(&host.agent, Spec::flat("e"));
    source.add("s", &tokens(30));
    capture(&host, "e").await;
    host
}

#[tokio::test]
async fn the_oldest_of_more_than_64_ready_snapshots_goes_and_a_newer_restore_replaces_an_older_one() {
    let host = with_snapshot().await;
    let name = |number: usize| format!("asks-{number}");
    let mut engines: Vec<Synthetic> = (0..66).map(|number| asking(&host, &name(number), "sha256:w")).collect();
    let ready = |number: usize| host.agent.staged().info(&name(number)).0;
    let stage = async |number: usize| restore(&host, &name(number), "now").await.unwrap();
    for number in 0..64 {
        stage(number).await;
    }
    let first = ready(0)[0].restore.clone();
    let report = stage(0).await;
    let again = ready(0);
    assert!(again.len() == 1 && again[0].ready && again[0].digest == report.digest && again[0].restore != first, "{again:?}");
    // The older one has no name any more.
    let handle = host.agent.engines().get(&name(0)).unwrap();
    let fill = ToAgent::Fill(Fill { restore: first, blocks: BTreeMap::new(), after: None, kept: 0, fill: None });
    assert_eq!(host.agent.answer(&handle, 0, fill).await.unwrap_err().code(), ErrorCode::InvalidRequest);

    // Now that of engine 1 is the oldest.
    stage(64).await;
    assert_eq!((0..65).filter(|number| ready(*number).is_empty()).collect::<Vec<_>>(), [1]);
    let told = |engine: &Synthetic| engine.told.lock().last().map(|states| states.boundaries.clone());
    until("the engine that lost it is told", || told(&engines[1]) == Some(vec![])).await;
    assert_eq!(told(&engines[64]), Some(vec![29]));
    // A snapshot that lay ready for an engine that left goes first.
    engines[5].leave();
    stage(65).await;
    assert_eq!((0..66).filter(|number| ready(*number).is_empty()).collect::<Vec<_>>(), [1, 5]);
}

#[tokio::test]
async fn an_engine_that_comes_back_finds_what_lay_ready_and_another_one_of_its_name_cannot_use_it() {
    let host = with_snapshot().await;
    let request = || ToAgent::Match(Match { tokens: tokens(40), ..Match::default() });
    let ask = async || {
        let handle = host.agent.engines().get("asks").unwrap();
        serde_json::from_value::<Matched>(host.agent.answer(&handle, 0, request()).await.unwrap()).unwrap()
    };
    let mut engine = asking(&host, "asks", "sha256:w");
    restore(&host, "asks", "now").await.unwrap();
    engine.leave();
    let engine = asking(&host, "asks", "sha256:w");
    assert!(matches!(ask().await, Matched::Ready { boundary: 29, .. }));
    drop(engine);

    let other = asking(&host, "asks", "sha256:other");
    let Matched::Ready { restore: name, .. } = ask().await else { panic!("tokens alone do not tell the weights") };
    other.add("mine", &tokens(30));
    other.forget_journal();
    let fill = Fill { restore: name, blocks: other.sequence("mine").blocks, after: None, kept: 0, fill: None };
    let handle = host.agent.engines().get("asks").unwrap();
    let error = host.agent.answer(&handle, 0, ToAgent::Fill(fill)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::FingerprintMismatch, "{error}");
    assert_eq!(other.journal(), [], "its memory was touched");
    assert!(matches!(ask().await, Matched::None { .. }), "it is offered again");
}

#[tokio::test]
async fn who_asks_while_a_snapshot_is_pulled_is_told_to_ask_again() {
    let host = host().await;
    let mut spec = Spec::hybrid("asks");
    spec.verbs = vec![Verb::Request];
    let _asking = Synthetic::start(&host.agent, spec.clone());
    spec.name = "other".into();
    let _other = Synthetic::start(&host.agent, spec);
    let ask = async |engine: &str| {
        let handle = host.agent.engines().get(engine).unwrap();
        let call = ToAgent::Match(Match { tokens: tokens(62), ..Match::default() });
        serde_json::from_value::<Matched>(host.agent.answer(&handle, 0, call).await.unwrap()).unwrap()
    };
    // A registry that takes connections and never answers.
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let reference = format!("http://{}/team/agent:now", silent.local_addr().unwrap());
    let agent = host.agent.clone();
    let pulling =
        tokio::spawn(async move { agent.restore("asks", RestoreRequest { reference, local: false, ..RestoreRequest::default() }).await });
    let _asked = silent.accept().await.unwrap();
    assert_eq!(ask("asks").await, Matched::Later {});
    assert!(matches!(ask("other").await, Matched::None { .. }));
    pulling.abort();
    assert!(pulling.await.unwrap_err().is_cancelled());
    assert!(matches!(ask("asks").await, Matched::None { .. }));
    // Neither does a failure leave it waiting.
    restore(&host, "asks", "nothing").await.unwrap_err();
    assert!(matches!(ask("asks").await, Matched::None { .. }));
}

fn wipe(engine: &Synthetic) {
    for memory in &engine.memories {
        let size = pfr_agent::memory::PageMemory::size(&**memory);
        memory.put(0, vec![0xee; size as usize]);
    }
}
