//! Snapshots of synthetic engines: what is in them, and what they cost.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::Event;
use crate::common::{Host, host, host_with, tokens, until};
use pfr_agent::Error;
use pfr_schema::agent::{Push, SnapshotReport, SnapshotRequest};
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::engine::{Oracle, Verb};
use pfr_schema::flat;
use pfr_schema::run::Run;
use pfr_schema::snapshot::{Exactness, Manifest, SnapshotConfig};
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, Limits, media_type};
use pfr_store::Pin;

fn request(reference: &str) -> SnapshotRequest {
    SnapshotRequest { reference: reference.into(), push: Push::Never, ..SnapshotRequest::default() }
}

async fn snapshot(host: &Host, engine: &str) -> SnapshotReport {
    host.agent.snapshot(engine, request("team/agent:now")).await.unwrap()
}

async fn manifest(host: &Host, digest: &Digest) -> Manifest {
    host.agent.store().manifest(digest).await.unwrap()
}

async fn trees(host: &Host, digest: &Digest) -> Vec<PageTree> {
    let mut trees = Vec::new();
    for layer in manifest(host, digest).await.layers_of(media_type::TREE) {
        trees.push(PageTree::parse(&host.agent.store().read(&layer.digest).await.unwrap(), &Limits::default()).unwrap());
    }
    trees
}

async fn pages(host: &Host, tree: &PageTree) -> Vec<Digest> {
    let mut digests = Vec::new();
    for run in &tree.runs {
        let run = Run::parse(&host.agent.store().read(&run.digest).await.unwrap(), &Limits::default()).unwrap();
        digests.extend_from_slice(run.digests());
    }
    digests
}

fn reads(journal: &[Event]) -> usize {
    journal.iter().map(|event| if let Event::Read(n) = event { *n } else { 0 }).sum()
}

#[tokio::test]
async fn equal_state_has_equal_trees_and_checkpoints_wherever_it_lies() {
    let (one, two) = (host().await, host().await);
    let a = Synthetic::start(&one.agent, Spec::hybrid("a").placed(1, 0));
    let b = Synthetic::start(&two.agent, Spec::hybrid("b").placed(2, 96));
    a.add("first", &tokens(60));
    b.add("other", &tokens(99));
    b.add("second", &tokens(60));
    assert_ne!(a.sequence("first").blocks, b.sequence("second").blocks);

    let first = snapshot(&one, "a").await;
    let request = SnapshotRequest { sequence: Some("second".into()), ..request("team/agent:now") };
    let second = two.agent.snapshot("b", request).await.unwrap();
    let (first, second) = (manifest(&one, &first.digest).await, manifest(&two, &second.digest).await);
    assert_eq!(first.layers, second.layers);
    let kinds: Vec<&str> = first.layers.iter().map(|layer| layer.media_type.as_str()).collect();
    let expected = [media_type::TREE, media_type::TREE, media_type::TREE, media_type::CHECKPOINT, media_type::TOKENS, media_type::ORACLE];
    assert_eq!(kinds, expected);
}

#[tokio::test]
async fn state_that_the_store_has_is_hashed_and_not_copied() {
    let host = host().await;
    let a = Synthetic::start(&host.agent, Spec::hybrid("a").placed(1, 0));
    let b = Synthetic::start(&host.agent, Spec::hybrid("b").placed(2, 96));
    a.add("s", &tokens(61));
    b.add("s", &tokens(61));
    let first = snapshot(&host, "a").await;
    assert_eq!((first.bytes_new, first.bytes_moved), (first.bytes_resident, first.bytes_resident));

    let second = snapshot(&host, "b").await;
    let states = 4 * (24 + 100);
    assert_eq!((second.bytes_new, second.bytes_moved, second.bytes_state), (0, states, 0));
    assert_eq!(second.bytes_resident, first.bytes_resident);
    assert_eq!(reads(&b.journal()), 0, "pages were read: {:?}", b.journal());
}

#[tokio::test]
async fn a_grown_session_moves_its_new_pages_only() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &tokens(41));
    let first = snapshot(&host, "e").await;
    let page = 4 * 3 * 64;
    assert_eq!((first.boundary, first.tokens, first.pages), (40, 41, 10));
    assert_eq!(first.bytes_moved, 10 * 2 * page);

    engine.step("s", 8);
    let second = snapshot(&host, "e").await;
    assert_eq!((second.boundary, second.pages), (48, 12));
    assert_eq!((second.bytes_moved, second.bytes_new), (2 * 2 * page, 2 * 2 * page));
    assert_eq!(second.bytes_resident, 12 * 2 * page);
    assert_eq!(second.parent, Some(first.digest));

    engine.step("s", 1);
    let third = snapshot(&host, "e").await;
    assert_eq!((third.bytes_moved, third.pages, third.parent), (2 * page, 13, Some(second.digest)));
}

#[tokio::test]
async fn while_the_engine_stands_still_no_page_is_hashed_or_read() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    let mut aside = Vec::new();
    for (name, length) in [("short", 30), ("long", 498)] {
        engine.add(name, &tokens(length));
        engine.forget_journal();
        let request = SnapshotRequest { sequence: Some(name.into()), ..request("team/agent:now") };
        host.agent.snapshot("e", request).await.unwrap();
        let journal = engine.journal();
        let at = |call| journal.iter().position(|event| *event == Event::Call(call)).unwrap();
        let paused = &journal[at("pause")..=at("resume")];
        let only = [Event::Call("pause"), Event::Call("table"), paused[2].clone(), Event::Call("pin"), Event::Call("resume")];
        assert_eq!(paused, only, "{name}");
        aside.push(paused[2].clone());
        assert!(journal[at("resume")..].iter().any(|event| matches!(event, Event::Hash(_))), "{journal:?}");
    }
    // Two components of one flat page, an opaque page, a page of a window, two states: whatever the
    // length.
    assert_eq!(aside, [Event::SetAside(6), Event::SetAside(6)]);
}

#[tokio::test]
async fn an_engine_without_pins_stands_still_until_its_bytes_have_left() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e").without(Verb::Pin));
    engine.add("s", &tokens(30));
    snapshot(&host, "e").await;
    let journal = engine.journal();
    let at = |wanted: &dyn Fn(&Event) -> bool| journal.iter().rposition(wanted).unwrap();
    let resumed = at(&|event| *event == Event::Call("resume"));
    assert!(at(&|event| matches!(event, Event::Read(_) | Event::ReadAside(_))) < resumed, "{journal:?}");
    assert!(at(&|event| *event == Event::Call("oracle")) > resumed, "{journal:?}");
    assert!(!engine.is_paused());
}

#[tokio::test]
async fn what_the_engine_does_after_it_goes_on_is_not_in_the_snapshot() {
    let (still, running) = (host().await, host().await);
    let a = Synthetic::start(&still.agent, Spec::hybrid("e"));
    let b = Synthetic::start(&running.agent, Spec { steps_on_resume: 7, ..Spec::hybrid("e") });
    a.add("s", &tokens(30));
    b.add("s", &tokens(30));
    let (first, second) = (snapshot(&still, "e").await, snapshot(&running, "e").await);
    assert_eq!(b.sequence("s").boundary, 36);
    let (first, second) = (manifest(&still, &first.digest).await, manifest(&running, &second.digest).await);
    assert_eq!(first.layers, second.layers);
}

#[tokio::test]
async fn trees_tell_columns_fill_and_layout() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(31));
    let report = snapshot(&host, "e").await;
    let trees = trees(&host, &report.digest).await;
    let told: Vec<_> = trees
        .iter()
        .map(|t| {
            (t.group.name.as_str(), t.ix.iter().collect::<Vec<_>>(), t.sequences[0].id.as_str(), t.sequences[0].fill, t.layout.as_str())
        })
        .collect();
    let opaque = "opaque/synthetic/reference/v1";
    // T = 30, blocks of 4: the window of 10 needs tokens 21.. of columns 5..8.
    let expected = [
        ("index", (0..8).collect::<Vec<u32>>(), "0", 2, opaque),
        ("main", (0..8).collect(), "0", 2, flat::LAYOUT),
        ("near", (5..8).collect(), "0", 2, opaque),
    ];
    assert_eq!(told, expected);
    assert_eq!(report.pages, 8 + 8 + 3);

    // The last page of the flat group: two tokens of four, in each of three layers, then zeros.
    let digests = pages(&host, &trees[1]).await;
    let last = host.agent.store().read(digests.last().unwrap()).await.unwrap();
    for layer in last.chunks(4 * 64) {
        assert!(layer[..2 * 64].iter().any(|byte| *byte != 0));
        assert!(layer[2 * 64..].iter().all(|byte| *byte == 0));
    }
}

#[tokio::test]
async fn checkpoint_tokens_oracle_and_configuration_tell_one_boundary() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add_with("s", &tokens(31), |sequence| {
        sequence.salt = "tenant".into();
        sequence.adapter = Some("lora".into());
        sequence.sampling.insert("temperature".into(), 0.into());
    });
    let mut request = request("team/agent");
    request.agent = Some("planner".into());
    request.labels.insert("run".into(), "7".into());
    let report = host.agent.snapshot("e", request).await.unwrap();
    assert_eq!(report.reference, "team/agent:s");
    let manifest = manifest(&host, &report.digest).await;
    assert_eq!(manifest.annotations["run"], "7");
    let read = async |media_type: &str| {
        let digest = manifest.layers_of(media_type).next().unwrap().digest;
        host.agent.store().read(&digest).await.unwrap()
    };
    let checkpoint = Checkpoint::parse(&read(media_type::CHECKPOINT).await, &Limits::default()).unwrap();
    let fingerprint = host.agent.engines().get("e").unwrap().fingerprint();
    assert_eq!(checkpoint.key.tokens, 30);
    assert_eq!(checkpoint.key.prefix, pfr_schema::prefix::key(&fingerprint, "tenant", Some("lora"), &tokens(30)));
    let names: Vec<&str> = checkpoint.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["layers.1.conv", "layers.1.ssm"]);
    for tensor in &checkpoint.tensors {
        assert_eq!(host.agent.store().read(&tensor.payload_hash).await.unwrap().len() as u64, tensor.payload_bytes);
    }
    let stored: Vec<u32> = read(media_type::TOKENS).await.chunks_exact(4).map(|raw| u32::from_le_bytes(raw.try_into().unwrap())).collect();
    assert_eq!(stored, tokens(31));
    let oracle: Oracle = serde_json::from_slice(&read(media_type::ORACLE).await).unwrap();
    assert_eq!((oracle.boundary, oracle.top.len()), (30, 8));
    let config = host.agent.store().read(&manifest.config.digest).await.unwrap();
    let config = SnapshotConfig::parse(&config, &Limits::default()).unwrap();
    assert_eq!(config.agent.as_deref(), Some("planner"));
    assert_eq!(config.engine.as_deref(), Some("synthetic 1"));
    assert_eq!((config.fingerprint, config.boundary, config.prefix), (Some(fingerprint), Some(30), Some(checkpoint.key)));
    assert_eq!((config.exactness, config.sampling.len()), (Some(Exactness::BitExact), 1));
    assert!(config.created.unwrap().ends_with('Z'));
}

#[tokio::test]
async fn ranks_have_trees_and_checkpoints_of_their_own_and_share_what_is_replicated() {
    let host = host().await;
    let groups =
        vec![Group::flat("main"), Group { replicated: true, ..Group::opaque("latent") }, Group::recurrent("mamba", &[("conv", 10)])];
    let engine = Synthetic::start(&host.agent, Spec::with("e", groups).ranks(2));
    engine.add("s", &tokens(30));
    let report = snapshot(&host, "e").await;
    let trees = trees(&host, &report.digest).await;
    let shards: Vec<_> = trees.iter().map(|tree| (tree.group.name.as_str(), tree.rank, tree.world)).collect();
    assert_eq!(shards, [("latent", 0, 2), ("main", 0, 2), ("main", 1, 2)]);
    assert_ne!(pages(&host, &trees[1]).await, pages(&host, &trees[2]).await);
    let manifest = manifest(&host, &report.digest).await;
    let ranks: Vec<&str> = manifest.layers_of(media_type::CHECKPOINT).map(|layer| layer.annotations["org.pf.rank"].as_str()).collect();
    assert_eq!(ranks, ["0", "1"]);
    assert_eq!(report.pages, 3 * 8);
}

#[tokio::test]
async fn a_session_larger_than_the_ring_goes_through_it() {
    let ring = 16 << 10;
    let host = host_with(|config| config.ring_bytes = ring).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(900));
    let report = snapshot(&host, "e").await;
    assert!(report.bytes_moved > 20 * ring, "{}", report.bytes_moved);
    assert_eq!(host.agent.engines().ring().used(), 0);
}

#[tokio::test]
async fn exact_is_refused_when_something_is_not_recorded() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add_with("s", &tokens(10), |sequence| sequence.unrecorded = vec!["grammar".into()]);
    let exact = SnapshotRequest { exact: true, ..request("team/agent:now") };
    let error = host.agent.snapshot("e", exact.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::NotExact { unrecorded } if unrecorded == "grammar"), "{error}");
    let report = snapshot(&host, "e").await;
    assert_eq!((report.exactness, report.unrecorded), (Exactness::NearExact, vec!["grammar".to_owned()]));

    let mut spec = Spec::flat("loose");
    spec.deployment.remove("deterministic");
    let loose = Synthetic::start(&host.agent, spec);
    loose.add("s", &tokens(10));
    assert!(matches!(host.agent.snapshot("loose", exact).await, Err(Error::NotExact { .. })));
    assert_eq!(snapshot(&host, "loose").await.exactness, Exactness::NearExact);
    assert!(!engine.is_paused() && !loose.is_paused());
}

#[tokio::test]
async fn logits_are_left_out_where_there_are_none() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e").without(Verb::Oracle));
    engine.add("s", &tokens(10));
    let report = snapshot(&host, "e").await;
    assert!(!report.oracle);
    assert_eq!(manifest(&host, &report.digest).await.layers_of(media_type::ORACLE).count(), 0);

    let asked = Synthetic::start(&host.agent, Spec::flat("asked"));
    asked.add("s", &tokens(10));
    let none = SnapshotRequest { oracle: Some(0), ..request("team/agent:now") };
    assert!(!host.agent.snapshot("asked", none).await.unwrap().oracle);
    assert!(!asked.journal().contains(&Event::Call("oracle")));
}

#[tokio::test]
async fn a_sequence_must_be_named_where_there_are_several() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    assert!(matches!(host.agent.snapshot("e", request("a/b:c")).await, Err(Error::SequenceUnknown { .. })));
    engine.add("one", &tokens(10));
    engine.add("two", &tokens(10));
    let error = host.agent.snapshot("e", request("a/b:c")).await.unwrap_err();
    assert!(matches!(&error, Error::SequenceAmbiguous { known, .. } if known == "one, two"), "{error}");
    let named = |name: &str| SnapshotRequest { sequence: Some(name.into()), ..request("a/b:c") };
    let error = host.agent.snapshot("e", named("three")).await.unwrap_err();
    assert!(matches!(&error, Error::SequenceUnknown { known, .. } if known == "one, two"), "{error}");
    assert_eq!(host.agent.snapshot("e", named("two")).await.unwrap().sequence, "two");
    // An engine may have 50,000 of them, and an error names ten.
    for number in 3..=12 {
        engine.add(&format!("{number:02}"), &tokens(10));
    }
    for unnamed in [request("a/b:c"), named("three")] {
        let error = host.agent.snapshot("e", unnamed).await.unwrap_err();
        let (Error::SequenceAmbiguous { known, .. } | Error::SequenceUnknown { known, .. }) = &error else { panic!("{error}") };
        assert_eq!(known, "03, 04, 05, 06, 07, 08, 09, 10, 11, 12 and 2 more");
    }
    until("the engine goes on", || !engine.is_paused()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_limited_size_evicts_in_the_background_after_each_capture_and_no_only_copy() {
    let host = host_with(|config| config.max_store_size = Some(pfr_client::ByteSize(1))).await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &tokens(6));
    let (store, repository) = (host.agent.store(), "team/agent".parse().unwrap());
    for _ in 0..3 {
        let digest = snapshot(&host, "e").await.digest;
        let evicted = async {
            while !store.metadata().evictable(10).await.unwrap().is_empty() {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(30), evicted).await.expect("nothing was evicted");
        // It was not to be pushed, so this host has the only copy.
        let pinned = store.pinned().await.unwrap();
        assert!(pinned.len() == 1 && pinned[0].snapshot.digest == digest, "{pinned:?}");
        assert!(!store.pin(&repository, &digest, Pin::UntilPushed, false).await.unwrap(), "nothing else pins it");
        engine.step("s", 3);
    }
}
