//! Slots of `llama-server`, captured and restored through their files.

use crate::common::llama::Server;
use crate::common::{Host, host_with};
use pfr_agent::{Error, Result};
use pfr_schema::agent::{DrainRequest, EngineState, Push, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest};
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::run::Run;
use pfr_schema::snapshot::Exactness;
use pfr_schema::tree::PageTree;
use pfr_schema::{ErrorCode, Limits, media_type};
use pfr_testkit::llama::{Attention, File, Section, tokens};
use std::collections::BTreeSet;

/// An agent with two servers of one model, `a` and `b`, that share a folder.
pub struct Rig {
    pub host: Host,
    pub a: Server,
    pub b: Server,
    pub dir: tempfile::TempDir,
}

impl Rig {
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("slots")).unwrap();
        Self::in_folder(dir).await
    }

    /// With the servers' folder `slots` in another one.
    pub async fn in_folder(dir: tempfile::TempDir) -> Self {
        let (slots, model) = (dir.path().join("slots"), dir.path().join("model.gguf"));
        std::fs::write(&model, "a model").unwrap();
        let (a, b) = (Server::start(&slots, &model, 3).await, Server::start(&slots, &model, 3).await);
        let servers = vec![a.settings("a"), b.settings("b")];
        let host = host_with(|config| (config.llama, config.engine_timeout) = (servers, std::time::Duration::from_millis(300))).await;
        Self { host, a, b, dir }
    }

    pub async fn snapshot(&self, engine: &str, slot: Option<&str>, tag: &str) -> Result<SnapshotReport> {
        let sequence = slot.map(Into::into);
        let request = SnapshotRequest { sequence, reference: format!("team/agent:{tag}"), push: Push::Never, ..SnapshotRequest::default() };
        self.host.agent.snapshot(engine, request).await
    }

    pub async fn restore(&self, engine: &str, slot: Option<&str>, tag: &str) -> Result<RestoreReport> {
        let request = RestoreRequest {
            reference: format!("team/agent:{tag}"),
            local: true,
            sequence: slot.map(Into::into),
            ..RestoreRequest::default()
        };
        self.host.agent.restore(engine, request).await
    }
}

pub fn code<T: std::fmt::Debug>(result: &Result<T>) -> ErrorCode {
    result.as_ref().unwrap_err().code()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_goes_to_another_server_and_its_file_is_the_saved_one() {
    let rig = Rig::start().await;
    let file = File::dense(tokens(200), 3, 96);
    rig.a.put(1, &file);
    let report = rig.snapshot("a", None, "one").await.unwrap();
    assert_eq!((report.sequence.as_str(), report.boundary, report.pages), ("1", 200, 13));
    assert!(report.pause_seconds > 0.0 && report.bytes_new > 0);
    let manifest = rig.host.agent.store().manifest(&report.digest).await.unwrap();
    let saved = rig.a.state.lock().slots[1].clone();
    assert_eq!(manifest.annotations["llama.cpp.state-file"], pfr_schema::Digest::sha256(&saved).to_string());
    // The last page has the rows of eight tokens in each of the six blocks, and then zeros.
    let read = async |digest| rig.host.agent.store().read(&digest).await.unwrap();
    let tree = manifest.layers_of(media_type::TREE).next().unwrap().digest;
    let tree = PageTree::parse(&read(tree).await, &Limits::default()).unwrap();
    assert_eq!(tree.page_size_tokens, 16);
    let run = Run::parse(&read(tree.runs.last().unwrap().digest).await, &Limits::default()).unwrap();
    let page = read(*run.digests().last().unwrap()).await;
    assert_eq!(page.len(), 6 * 16 * 96);
    for block in page.chunks(16 * 96) {
        assert!(block[..8 * 96].iter().any(|byte| *byte != 0) && block[8 * 96..].iter().all(|byte| *byte == 0));
    }

    let done = rig.restore("b", None, "one").await.unwrap();
    assert_eq!((done.sequence.as_deref(), done.boundary), (Some("0"), 200));
    assert_eq!(rig.b.state.lock().restored, [saved], "byte for byte");
    assert_eq!(rig.b.state.lock().slots[0], File { slot: 0, ..file }.bytes());
    assert!(rig.a.files().is_empty(), "{:?}", rig.a.files());

    let engines = rig.host.agent.llamas().list();
    assert_eq!(engines.iter().map(|e| (e.snapshots, e.restores)).collect::<Vec<_>>(), [(1, 0), (0, 1)]);
    assert!(engines.iter().all(|e| e.state == EngineState::Ready {} && e.deployment["n_ctx"] == 4096));
    // Slot 0 is in use now.
    assert_eq!(rig.restore("b", None, "one").await.unwrap().sequence.as_deref(), Some("1"));
    assert_eq!(rig.restore("b", Some("0"), "one").await.unwrap().sequence.as_deref(), Some("0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_comes_back_byte_for_byte() {
    let dense = |change: fn(&mut Attention)| {
        let mut attention = Attention::plain(70, 2, 64);
        change(&mut attention);
        Section::Attention(attention)
    };
    let window = dense(|a| a.positions = (40..70).collect());
    let forms: [(&str, Vec<Section>); 7] = [
        ("more in each cell", vec![dense(|a| a.extra = true)]),
        ("transposed", vec![dense(|a| a.transposed = Some(2))]),
        ("latent", vec![dense(|a| a.v = None)]),
        ("quantized", vec![dense(|a| (a.k, a.v, a.rotation) = ((8, 68), Some((2, 36)), [64, 64]))]),
        ("another order", vec![dense(|a| a.positions.rotate_left(9))]),
        ("windows", vec![dense(|_| {}), window.clone()]),
        ("hybrid", vec![window, Section::Recurrent { layers: 4, with: 3, r: 48, s: 96 }]),
    ];
    for (name, sections) in forms {
        let rig = Rig::start().await;
        let file = File { tokens: tokens(70), sections, slot: 2 };
        rig.a.put(2, &file);
        let report = rig.snapshot("a", None, "one").await.unwrap();
        assert_eq!(report.boundary, 70, "{name}");
        if name == "hybrid" {
            let store = rig.host.agent.store();
            let manifest = store.manifest(&report.digest).await.unwrap();
            let checkpoint = manifest.layers_of(media_type::CHECKPOINT).next().unwrap().digest;
            let checkpoint = Checkpoint::parse(&store.read(&checkpoint).await.unwrap(), &Limits::default()).unwrap();
            let kinds: BTreeSet<&str> = checkpoint.tensors.iter().map(|tensor| tensor.kind.as_str()).collect();
            assert_eq!(kinds, BTreeSet::from(["conv", "other:llama.cpp-state-file", "recurrent", "window"]));
        }
        // The other server has its cells in their natural order.
        let restored = rig.restore("b", Some("2"), "one").await.unwrap();
        assert!(restored.bytes_written >= file.bytes().len() as u64, "{name}");
        assert_eq!(rig.b.state.lock().restored, [file.bytes()], "{name}");
        assert!(rig.a.files().is_empty(), "{name}: {:?}", rig.a.files());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_stores_what_differs() {
    let rig = Rig::start().await;
    let mut fork = tokens(2000);
    rig.a.put(0, &File::dense(fork.clone(), 4, 128));
    let first = rig.snapshot("a", Some("0"), "one").await.unwrap();
    (1990..2000).for_each(|at| fork[at] = 7);
    rig.a.put(1, &File::dense(fork, 4, 128));
    let second = rig.snapshot("a", Some("1"), "two").await.unwrap();
    let share = second.bytes_new as f64 / first.bytes_resident as f64;
    assert!(share < 0.15, "{} of {} bytes are new", second.bytes_new, first.bytes_resident);
    assert_eq!(first.bytes_new, first.bytes_resident);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_prefix_is_a_parent() {
    let rig = Rig::start().await;
    rig.a.put(0, &File::dense(tokens(50), 1, 32));
    let first = rig.snapshot("a", Some("0"), "one").await.unwrap();
    rig.a.put(0, &File::dense(tokens(60), 1, 32));
    let second = rig.snapshot("a", Some("0"), "two").await.unwrap();
    assert_eq!(second.parent, Some(first.digest));
    // Another conversation in the same slot.
    let other: Vec<u32> = (5..70).collect();
    rig.a.put(0, &File::dense(other, 1, 32));
    assert_eq!(rig.snapshot("a", Some("0"), "three").await.unwrap().parent, None);
    // A restored conversation goes on.
    rig.restore("a", Some("1"), "two").await.unwrap();
    rig.a.put(1, &File::dense(tokens(80), 1, 32));
    assert_eq!(rig.snapshot("a", Some("1"), "four").await.unwrap().parent, Some(second.digest));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_by_name() {
    let rig = Rig::start().await;
    let file = File::dense(tokens(40), 3, 96);
    rig.a.put(0, &file);
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    let with = |change: fn(&mut Attention)| {
        let mut attention = Attention::plain(1, 3, 96);
        change(&mut attention);
        File { tokens: tokens(1), sections: vec![Section::Attention(attention)], slot: 0 }
    };
    for (words, other) in [
        (["3 K q8_0 102", "3 K f16 96"], with(|a| a.k = (8, 102))),
        (["2 K f16 96", "3 K f16 96"], with(|a| a.layers = 2)),
        (["rotations 0 and 64", "rotations 0 and 0"], with(|a| a.rotation = [0, 64])),
        (["2 streams", "1 streams"], with(|a| a.streams = 2)),
        (["V f16 96 transposed", "V f16 96"], with(|a| a.transposed = Some(2))),
    ] {
        rig.b.accept(&other);
        let refused = rig.restore("b", None, "one").await;
        let error = refused.as_ref().unwrap_err().to_string();
        assert_eq!(code(&refused), ErrorCode::GeometryMismatch, "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
        assert!(rig.b.files().is_empty());
        // The token that the slot computed to tell the form is gone.
        let empty = File::dense(Vec::new(), 0, 0).bytes();
        assert!(rig.b.state.lock().slots.iter().all(|slot| *slot == empty), "a slot is not empty");
    }
    rig.b.accept(&file);
    std::fs::write(rig.dir.path().join("other.gguf"), "another model").unwrap();
    rig.b.state.lock().model = rig.dir.path().join("other.gguf");
    let refused = rig.restore("b", None, "one").await;
    assert_eq!(code(&refused), ErrorCode::FingerprintMismatch);
    assert!(refused.unwrap_err().to_string().contains("weights"));
    rig.b.state.lock().model = rig.dir.path().join("model.gguf");
    rig.restore("b", None, "one").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_another_build_context_or_adapter_is_refused_by_name() {
    let rig = Rig::start().await;
    let adapter = |name: &str, bytes: &str| {
        let path = rig.dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let (one, copy, other) = (adapter("one.gguf", "1"), adapter("copy.gguf", "1"), adapter("other.gguf", "2"));
    rig.a.state.lock().adapters = vec![(one.clone(), 0.5)];
    rig.b.state.lock().adapters = vec![(copy, 0.5), (other.clone(), 0.0)];
    rig.a.put(0, &File::dense(tokens(40), 1, 32));
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    // The same bytes under another name, and one that is not in use.
    rig.restore("b", None, "one").await.unwrap();
    type Change<'a> = (&'a str, Box<dyn Fn(&mut crate::common::llama::Inner) + 'a>);
    let changes: [Change<'_>; 5] = [
        ("backend", Box::new(|server| server.build = "b11435-test".into())),
        ("n_ctx", Box::new(|server| server.context = 8192)),
        ("adapters", Box::new(|server| server.adapters = vec![(one.clone(), 1.0)])),
        ("adapters", Box::new(|server| server.adapters = vec![(other.clone(), 0.5)])),
        ("adapters", Box::new(|server| server.adapters = Vec::new())),
    ];
    for (key, change) in changes {
        let before = {
            let mut server = rig.b.state.lock();
            let before = (server.build.clone(), server.context, server.adapters.clone());
            change(&mut server);
            before
        };
        let refused = rig.restore("b", None, "one").await;
        assert_eq!(code(&refused), ErrorCode::FingerprintMismatch, "{key}: {refused:?}");
        assert!(refused.unwrap_err().to_string().contains(key), "{key}");
        let mut server = rig.b.state.lock();
        (server.build, server.context, server.adapters) = before;
    }
    rig.restore("b", None, "one").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_is_near_exact_and_a_file_that_the_agent_does_not_know_is_not_stored() {
    let rig = Rig::start().await;
    rig.a.put(0, &File::dense(tokens(40), 1, 32));
    let report = rig.snapshot("a", Some("0"), "one").await.unwrap();
    assert_eq!(report.exactness, Exactness::NearExact);
    assert!(report.unrecorded[0].contains("sampling settings"), "{:?}", report.unrecorded);
    let request = SnapshotRequest { sequence: Some("0".into()), reference: "team/agent:exact".into(), ..SnapshotRequest::default() };
    let exact = rig.host.agent.snapshot("a", SnapshotRequest { exact: true, push: Push::Never, ..request }).await;
    assert_eq!(code(&exact), ErrorCode::NotExact);

    // Another version, and images beside the tokens.
    let good = rig.a.state.lock().slots[0].clone();
    let with = |at: usize, word: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        bytes
    };
    for (word, bytes) in [("version 4", with(4, 5)), ("media", with(12 + 4 * 43, 1))] {
        rig.a.state.lock().slots[0] = bytes;
        let refused = rig.snapshot("a", Some("0"), "unknown").await;
        assert_eq!(code(&refused), ErrorCode::InvalidDocument, "{word}");
        assert!(refused.unwrap_err().to_string().contains(word));
        assert!(rig.a.files().is_empty(), "{:?}", rig.a.files());
    }
    let tags = rig.restore("b", None, "unknown").await;
    assert_eq!(code(&tags), ErrorCode::TagUnknown, "it was stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_is_named_or_there_is_only_one() {
    let rig = Rig::start().await;
    for slot in ["3", "x", "-1"] {
        let refused = rig.snapshot("a", Some(slot), "one").await;
        assert_eq!(code(&refused), ErrorCode::SequenceUnknown, "{slot}");
        assert!(refused.unwrap_err().to_string().contains("slots 0 to 2"));
    }
    assert_eq!(code(&rig.snapshot("a", None, "one").await), ErrorCode::SequenceUnknown);
    assert!(rig.snapshot("a", Some("0"), "one").await.unwrap_err().to_string().contains("no state yet"));
    rig.a.put(0, &File::dense(tokens(20), 1, 32));
    rig.a.put(2, &File::dense(tokens(30), 1, 32));
    let several = rig.snapshot("a", None, "one").await;
    assert!(matches!(&several, Err(Error::SequenceAmbiguous { known, .. }) if known == "0, 2"), "{several:?}");
    rig.snapshot("a", Some("2"), "one").await.unwrap();
    // A slot that is in use is overwritten only by name.
    rig.a.put(1, &File::dense(tokens(9), 1, 32));
    assert!(rig.restore("a", None, "one").await.unwrap_err().to_string().contains("--sequence"));
    assert_eq!(rig.restore("a", Some("1"), "one").await.unwrap().sequence.as_deref(), Some("1"));
    // Socket engines have no slots, and no engine takes the name of a server.
    assert_eq!(code(&rig.snapshot("c", None, "one").await), ErrorCode::EngineUnknown);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_captures_every_slot_with_state() {
    let rig = Rig::start().await;
    rig.a.put(0, &File::dense(tokens(20), 1, 32));
    rig.a.put(2, &File::dense(tokens(30), 1, 32));
    rig.b.put(1, &File::dense(tokens(30), 1, 32));
    // The watch has asked both which model they run.
    let ready = || rig.host.agent.llamas().list().iter().all(|info| info.state == EngineState::Ready {});
    crate::common::until("both servers are known", ready).await;
    let request = DrainRequest { repository: "http://127.0.0.1:1/gone".into(), plan_only: true, ..DrainRequest::default() };
    let plan = rig.host.agent.drain(request).await.unwrap().plan;
    let slots: Vec<_> = plan.iter().map(|item| (item.engine.as_str(), item.sequence.as_str(), item.boundary)).collect();
    assert_eq!(slots, [("a", "0", 20), ("a", "2", 30), ("b", "1", 30)]);
}
