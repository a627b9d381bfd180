//! Snapshots restored into engines with other ranks: every head and every channel is where the
//! engine looks for it, or nothing is written.
//!
//! The tests paint and read the heads of a rank by their number over all ranks, not by the shares
//! that the engine registers.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Heads, Spec, Split};
use crate::common::memory::Fault;
use crate::common::{Host, host, tokens, until};
use pfr_agent::engines::Answers as _;
use pfr_agent::memory::Span;
use pfr_schema::agent::{Push, RestoreReport, RestoreRequest, SnapshotRequest};
use pfr_schema::checkpoint::{Dtype, Form, Layout};
use pfr_schema::engine::{Fill, MatchKeys, Matched, ToAgent, Verb};
use pfr_schema::tree::GroupKind;
use pfr_schema::{Algorithm, Digest, ErrorCode, prefix};
use serde_json::json;

const STATES: &[(&str, u64)] = &[("layers.1.conv", 0), ("layers.1.ssm", 0)];

fn row_major(shape: &[u64]) -> Form {
    let layout = Layout::row_major(shape);
    Form { storage_dtype: Dtype::F32, layout, bytes: shape.iter().product::<u64>() * 4 }
}

/// The last dimension first, in another type.
fn column_major(shape: &[u64]) -> Form {
    let (mut strides, mut next) = (Vec::new(), 1);
    for dimension in shape {
        strides.push(next);
        next *= *dimension as i64;
    }
    let layout = Layout { tag: "column-major".into(), strides: Some(strides), offset: Some(0) };
    Form { storage_dtype: Dtype::Bf16, layout, bytes: next as u64 * 2 }
}

fn opaque(shape: &[u64]) -> Form {
    let layout = Layout { tag: "vendor".into(), strides: None, offset: None };
    Form { layout, ..row_major(shape) }
}

/// A convolution window `[tokens, channels]` of three projections, and a state `[heads, 2, 3]`.
fn splits(form: fn(&[u64]) -> Form) -> Vec<Split> {
    let conv = Split { shape: vec![3, 16], axis: 1, sections: vec![8, 4, 4], replicated: false, form };
    vec![conv, Split { shape: vec![4, 2, 3], axis: 0, sections: vec![4], replicated: false, form }]
}

/// Pages with heads outermost and innermost, some of them replicated with more than two ranks, a
/// window, and recurrent state.
fn spec(name: &str, world: u32) -> Spec {
    let with = |heads: Heads, group: Group| Group { heads: Some(heads), token_bytes: 16, ..group };
    let groups = vec![
        with(Heads::new(4, true), Group::flat("main")),
        with(Heads::new(2, false), Group::opaque("index")),
        with(Heads::new(8, false), Group::window("near", 10)),
        Group { splits: splits(row_major), ..Group::recurrent("mamba", STATES) },
    ];
    let mut spec = Spec::with(name, groups).ranks(world).placed(u64::from(world), 32);
    spec.deployment.insert("tp".into(), json!(world));
    spec.parallel = vec!["tp".into()];
    spec
}

/// Where each head and each element of a sequence's state lies, by rank, with the bytes that belong
/// there.
fn cells(engine: &Synthetic, sequence: &str) -> Vec<(usize, Span, Vec<u8>)> {
    let (spec, sequence) = (&engine.spec, engine.sequence(sequence));
    let mut cells = Vec::new();
    for rank in 0..spec.world {
        let register = spec.register(rank);
        for (group, layout) in spec.groups.iter().zip(&register.groups) {
            let blocks = &sequence.blocks[group.name];
            for (split, state) in group.splits.iter().zip(&layout.states) {
                let base = state.part.offset + u64::from(blocks[0]) * state.part.block_stride;
                for (place, value) in elements(split, rank, spec.world, &state.name) {
                    let bytes = if state.storage_dtype == "f32" {
                        value.to_le_bytes().to_vec()
                    } else {
                        ((value.to_bits() >> 16) as u16).to_le_bytes().to_vec()
                    };
                    cells.push((rank as usize, Span { offset: base + place * bytes.len() as u64, bytes: bytes.len() as u64 }, bytes));
                }
            }
            let Some(heads) = group.heads.filter(|_| group.kind != GroupKind::Recurrent) else { continue };
            let (tokens, held) = (u64::from(group.block_tokens), heads.of(rank, spec.world));
            for (column, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
                for (component, layer, part) in
                    layout.components.iter().flat_map(|c| c.parts.iter().enumerate().map(move |(layer, part)| (&c.name, layer, part)))
                {
                    let base = part.offset + u64::from(*block) * part.block_stride;
                    for slot in (0..tokens).filter(|slot| column as u64 * tokens + slot < sequence.boundary) {
                        for (position, head) in held.iter().enumerate() {
                            let position = position as u64;
                            let at = if heads.tokens_first { slot * held.len() as u64 + position } else { position * tokens + slot };
                            let of = format!("{} {component} {layer} {column} {slot} {head}", group.name);
                            let bytes = Digest::of(Algorithm::Blake3, of.as_bytes()).as_bytes()[..group.token_bytes as usize].to_vec();
                            cells.push((rank as usize, Span { offset: base + at * group.token_bytes, bytes: group.token_bytes }, bytes));
                        }
                    }
                }
            }
        }
    }
    cells
}

/// Places of a rank's elements, in elements from the begin of the slot, with their values.
fn elements(split: &Split, rank: u32, world: u32, name: &str) -> Vec<(u64, f32)> {
    let (shape, units) = (split.shape_of(rank, world), split.of(rank, world));
    let form = (split.form)(&shape);
    // No code reads an opaque slot.
    let strides = form.layout.strides.unwrap_or_else(|| row_major(&shape).layout.strides.unwrap());
    let mut found = Vec::new();
    for linear in 0..shape.iter().product::<u64>() {
        let (mut index, mut rest) = (vec![0; shape.len()], linear);
        for (at, dimension) in index.iter_mut().zip(&shape).rev() {
            (*at, rest) = (rest % dimension, rest / dimension);
        }
        let place: u64 = index.iter().zip(&strides).map(|(i, stride)| i * *stride as u64).sum();
        index[split.axis] = units[index[split.axis] as usize];
        let value = index.iter().fold(name.len() as u64, |sum, i| (sum * 31 + i) % 251);
        found.push((place, value as f32));
    }
    found
}

fn paint(engine: &Synthetic, sequence: &str) {
    cells(engine, sequence).into_iter().for_each(|(rank, span, bytes)| engine.memories[rank].put(span.offset, bytes));
}

#[track_caller]
fn check(engine: &Synthetic, sequence: &str) {
    for (rank, span, bytes) in cells(engine, sequence) {
        assert_eq!(engine.memories[rank].get(span), bytes, "rank {rank}, {span:?}");
    }
}

/// An engine with a painted sequence of 62 tokens, captured under the engine's name.
async fn captured(host: &Host, spec: Spec) -> Synthetic {
    let name = spec.name.clone();
    let engine = Synthetic::start(&host.agent, spec);
    engine.add("s", &tokens(63));
    paint(&engine, "s");
    capture(host, &name, "s").await;
    engine
}

async fn capture(host: &Host, engine: &str, sequence: &str) -> Digest {
    let (reference, sequence) = (format!("team/agent:{engine}"), Some(sequence.to_owned()));
    let request = SnapshotRequest { reference, sequence, push: Push::Never, exact: true, ..SnapshotRequest::default() };
    host.agent.snapshot(engine, request).await.unwrap().digest
}

async fn restore(host: &Host, engine: &str, tag: &str, reshard: bool) -> pfr_agent::Result<RestoreReport> {
    host.agent
        .restore(engine, RestoreRequest { reference: format!("team/agent:{tag}"), local: true, reshard, ..RestoreRequest::default() })
        .await
}

#[tokio::test]
async fn every_head_and_channel_finds_its_place_and_comes_back() {
    for (from, to) in [(2, 1), (1, 2), (2, 4), (4, 2), (1, 4), (4, 1)] {
        let host = host().await;
        let a = captured(&host, spec("a", from)).await;
        let b = Synthetic::start(&host.agent, spec("b", to));
        let report = restore(&host, "b", "a", true).await.unwrap();
        let sequence = report.sequence.clone().unwrap();
        check(&b, &sequence);
        let done = report.resharded.clone().unwrap();
        assert_eq!((done.differs, done.from, done.to), (vec!["tp".to_owned()], from, to));
        assert!(done.pages > 0 && done.states == 2 * u64::from(to), "{report:?}");
        // Logits of other sums would differ, and are not compared.
        assert_eq!((report.values_computed, report.values_attested, report.oracle), (2 * u64::from(to), 0, false));
        // And back, through a snapshot of the other engine.
        capture(&host, "b", &sequence).await;
        let back = restore(&host, "a", "b", true).await.unwrap().sequence.unwrap();
        check(&a, &back);
        assert_eq!(a.content("s"), a.content(&back), "{from} to {to}");
        // The same ranks need no cut, with or without the option.
        for reshard in [false, true] {
            let report = restore(&host, "a", "a", reshard).await.unwrap();
            assert_eq!((report.resharded, report.oracle), (None, true));
        }
    }
}

#[tokio::test]
async fn heads_that_all_ranks_have_are_not_cut() {
    let host = host().await;
    let of = |name: &str, world| {
        let mut spec = spec(name, world);
        // A latent cache: one head on every rank. And a state that every rank has, which only its
        // engine can read.
        spec.groups = vec![Group { heads: Some(Heads::new(1, false)), token_bytes: 16, ..Group::opaque("latent") }];
        let whole = Split { shape: vec![4], axis: 0, sections: vec![4], replicated: true, form: opaque };
        spec.groups.push(Group { splits: vec![whole], ..Group::recurrent("rope", &[("layers.1.conv", 0)]) });
        spec
    };
    let _a = captured(&host, of("a", 2)).await;
    for world in [1, 4] {
        let name = format!("to-{world}");
        let b = Synthetic::start(&host.agent, of(&name, world));
        let report = restore(&host, &name, "a", true).await.unwrap();
        check(&b, &report.sequence.unwrap());
        let done = report.resharded.unwrap();
        assert_eq!((done.pages, done.states, report.values_attested), (0, 0, u64::from(world)));
    }
}

#[tokio::test]
async fn a_state_is_cut_into_another_layout_and_type() {
    let host = host().await;
    let _a = captured(&host, spec("a", 2)).await;
    for world in [1, 4] {
        let name = format!("to-{world}");
        let mut other = spec(&name, world);
        other.groups[3].splits = splits(column_major);
        let b = Synthetic::start(&host.agent, other);
        let sequence = restore(&host, &name, "a", true).await.unwrap().sequence.unwrap();
        check(&b, &sequence);
        capture(&host, &name, &sequence).await;
        let back = Synthetic::start(&host.agent, spec(&format!("back-{world}"), 2));
        let sequence = restore(&host, &format!("back-{world}"), &name, true).await.unwrap().sequence.unwrap();
        check(&back, &sequence);
    }
}

#[tokio::test]
async fn an_engine_that_asks_is_filled_rank_by_rank_and_keeps_what_is_equal() {
    let host = host().await;
    let _a = captured(&host, spec("a", 2)).await;
    let mut asks = spec("asks", 4);
    asks.verbs = vec![Verb::Request];
    let engine = Synthetic::start(&host.agent, asks.clone());
    engine.add("mine", &tokens(63));
    restore(&host, "asks", "a", true).await.unwrap();
    let handle = host.agent.engines().get("asks").unwrap();
    let call = async |rank, call| host.agent.answer(&handle, rank, call).await;
    // The engine asks with the key under its own configuration.
    let key = prefix::key(&prefix::fingerprint(&asks.deployment), "", None, &tokens(62));
    let keys = MatchKeys { tokens: 63, keys: vec![(62, key)], ..MatchKeys::default() };
    let matched = serde_json::from_value(call(0, ToAgent::MatchKeys(keys)).await.unwrap()).unwrap();
    let Matched::Ready { restore, boundary: 62, .. } = matched else { panic!("{matched:?}") };
    let blocks = engine.sequence("mine").blocks;
    let fill = |kept| ToAgent::Fill(Fill { restore: restore.clone(), blocks: blocks.clone(), after: None, kept, fill: None });
    for rank in 0..4 {
        call(rank, fill(0)).await.unwrap();
    }
    check(&engine, "mine");
    // Blocks that hold the same are compared and not written, and others are found.
    for rank in 0..4 {
        call(rank, fill(32)).await.unwrap();
    }
    let (rank, span, _) = cells(&engine, "mine").into_iter().find(|(rank, ..)| *rank == 3).unwrap();
    engine.memories[rank].put(span.offset, vec![0xee; span.bytes as usize]);
    let error = call(3, fill(32)).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Kept { .. }), "{error}");
    call(3, fill(0)).await.unwrap();
    check(&engine, "mine");
}

#[tokio::test]
async fn replicas_that_differ_are_refused() {
    let host = host().await;
    let replicated = |name: &str, world| {
        let mut spec = spec(name, world);
        // Half of the window is on every rank.
        spec.groups[3].splits[0] = Split { sections: vec![8, 8], replicated: true, ..spec.groups[3].splits[0].clone() };
        spec
    };
    let a = captured(&host, replicated("a", 4)).await;
    let b = Synthetic::start(&host.agent, replicated("b", 1));
    let sequence = restore(&host, "b", "a", true).await.unwrap().sequence.unwrap();
    check(&b, &sequence);

    // Ranks 0 and 1 have the same head of "index"; a byte of a full page differs. Then ranks hold
    // different values of the window's second half.
    let register = a.spec.register(1);
    let page = &register.groups[1].components[0].parts[0];
    let window = &register.groups[3].states[0].part;
    let blocks = a.sequence("s").blocks;
    for (part, block, word) in [
        (page, blocks["index"][2], r#"page 2 of group "index", which ranks 0 and 1 hold"#),
        (window, blocks["mamba"][0], r#"state "layers.1.conv" for rank 0: replicas of one value"#),
    ] {
        paint(&a, "s");
        let at = part.offset + u64::from(block) * part.block_stride + part.bytes - 4;
        a.memories[1].put(at, 1.0_f32.to_le_bytes().to_vec());
        capture(&host, "a", "s").await;
        b.forget_journal();
        let error = restore(&host, "b", "a", true).await.unwrap_err();
        assert_eq!((error.code(), b.journal()), (ErrorCode::RankMismatch, Vec::new()), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

type Change = fn(&mut Spec);

/// Engines that a snapshot over two ranks is not cut for.
const OTHERS: &[(&str, Change, ErrorCode, &str)] = &[
    (
        "weights",
        |s| drop(s.deployment.insert("weights".into(), json!("sha256:x"))),
        ErrorCode::FingerprintMismatch,
        "\n  tp: 1 in the engine, 2 in the snapshot\n  weights: \"sha256:x\" in the engine",
    ),
    ("silent", |s| s.parallel.clear(), ErrorCode::FingerprintMismatch, "\n  tp: 1 in the engine, 2 in the snapshot"),
    ("heads", |s| s.groups[1].heads = Some(Heads::new(4, false)), ErrorCode::GeometryMismatch, "units over all ranks"),
    ("order", |s| s.groups[1].heads = Some(Heads::new(2, true)), ErrorCode::GeometryMismatch, "repetitions"),
    ("width", |s| s.groups[1].token_bytes = 8, ErrorCode::GeometryMismatch, "repetitions"),
    ("block", |s| s.groups[1].block_tokens = 8, ErrorCode::GeometryMismatch, "tokens in a page"),
    ("deeper", |s| s.groups[1].layers = 4, ErrorCode::RankMismatch, r#"unit 0 of layer "layers.3""#),
    (
        "flatter",
        |s| s.groups[1].layers = 2,
        ErrorCode::RankMismatch,
        r#"layer "layers.2" of group "index": units that the engine's ranks take"#,
    ),
    (
        "uncut",
        |s| s.groups[1].uncut = Some("quantised"),
        ErrorCode::RankMismatch,
        r#"group "index" of the engine cannot be cut for other ranks: quantised"#,
    ),
    ("unsaid", |s| s.groups[1].heads = None, ErrorCode::RankMismatch, "does not say how its ranks share it"),
    ("blind", |s| s.groups[3].splits = splits(opaque), ErrorCode::GeometryMismatch, "opaque and cannot be cut"),
    (
        "axis",
        |s| s.groups[3].splits[1] = Split { shape: vec![4, 4, 3], axis: 1, ..s.groups[3].splits[1].clone() },
        ErrorCode::GeometryMismatch,
        "dimension that ranks share",
    ),
    ("channels", |s| s.groups[3].splits[0].sections = vec![8, 4, 8], ErrorCode::GeometryMismatch, "units over all ranks"),
    ("taller", |s| s.groups[3].splits[0].shape = vec![4, 16], ErrorCode::GeometryMismatch, r#"the engine's state layers.1.conv: shape"#),
    ("one part", |s| s.groups[3].one_part = true, ErrorCode::GeometryMismatch, "it shares bytes with state"),
    ("less", |s| drop(s.groups.remove(1)), ErrorCode::MissingGroup, "index"),
    ("more", |s| s.groups.push(Group { heads: Some(Heads::new(4, false)), ..Group::opaque("draft") }), ErrorCode::MissingGroup, "draft"),
    ("stateless", |s| drop(s.groups.remove(3)), ErrorCode::MissingState, "layers.1.conv"),
];

#[tokio::test]
async fn what_cannot_be_cut_is_refused_by_name_and_nothing_is_touched() {
    let host = host().await;
    let _a = captured(&host, spec("a", 2)).await;
    for (name, change, code, words) in OTHERS {
        let mut spec = spec(&name.replace(' ', "-"), 1);
        change(&mut spec);
        let name = spec.name.clone();
        let engine = Synthetic::start(&host.agent, spec);
        let error = restore(&host, &name, "a", true).await.unwrap_err();
        assert_eq!((error.code(), engine.journal()), (*code, Vec::new()), "{name}: {error}");
        assert!(error.to_string().contains(words), "{name}: {error}");
    }
    // Without the option nothing is cut, and the refusal says that it can be.
    let engine = Synthetic::start(&host.agent, spec("plain", 1));
    let error = restore(&host, "plain", "a", false).await.unwrap_err();
    assert_eq!((error.code(), engine.journal()), (ErrorCode::FingerprintMismatch, Vec::new()));
    assert!(error.to_string().contains("  tp: 1 in the engine, 2 in the snapshot\nnothing else differs: with --reshard"), "{error}");
    restore(&host, "plain", "a", true).await.unwrap();
}

#[tokio::test]
async fn snapshots_that_do_not_say_what_their_ranks_hold_are_refused() {
    let host = host().await;
    let _b = Synthetic::start(&host.agent, spec("b", 1));
    let cases: [(&str, Change, &str); 4] = [
        ("silent", |s| s.parallel.clear(), "\n  tp: 1 in the engine, 2 in the snapshot"),
        (
            "uncut",
            |s| s.groups[0].uncut = Some("quantised: its heads may share a scale"),
            r#"group "main" of the snapshot cannot be cut for other ranks: quantised"#,
        ),
        ("stateful", |s| s.groups[3].uncut = Some("kda"), r#"group "mamba" of the snapshot cannot be cut for other ranks: kda"#),
        (
            "lies",
            |s| s.groups[2].heads = Some(Heads { lies: true, ..Heads::new(8, false) }),
            r#"unit 4 of layer "layers.0" of group "near""#,
        ),
    ];
    for (name, change, words) in cases {
        let mut spec = spec(name, 2);
        change(&mut spec);
        let engine = Synthetic::start(&host.agent, spec);
        engine.add("s", &tokens(63));
        // Ranks that say the same have the same.
        paint(&engine, "s");
        if name == "lies" {
            let whole = Span { offset: 0, bytes: pfr_agent::memory::PageMemory::size(&*engine.memories[0]) };
            engine.memories[1].put(0, engine.memories[0].get(whole));
        }
        capture(&host, name, "s").await;
        let error = restore(&host, "b", name, true).await.unwrap_err();
        assert!(error.to_string().contains(words), "{name}: {error}");
        // Where the ranks are the same, nothing has to be said.
        restore(&host, name, name, false).await.unwrap();
    }
}

#[tokio::test]
async fn memory_that_does_not_keep_what_was_cut_is_found() {
    let host = host().await;
    let _a = captured(&host, spec("a", 2)).await;
    let lying = Synthetic::start(&host.agent, spec("lying", 4));
    lying.set(Fault::WritesLie);
    let error = restore(&host, "lying", "a", true).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LiveMismatch, "{error}");
    until("the blocks are back", || lying.waiting().is_empty()).await;
    lying.heal();
    let sequence = restore(&host, "lying", "a", true).await.unwrap().sequence.unwrap();
    check(&lying, &sequence);
}

mod shapes {
    use super::*;
    use proptest::prelude::*;
    use std::sync::OnceLock;

    fn runtime() -> &'static tokio::runtime::Runtime {
        static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
        RUNTIME.get_or_init(|| tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap())
    }

    /// Heads, order, ranks, layers, tokens in a block and in all.
    fn shape() -> impl Strategy<Value = (u64, bool, u32, u32, u32, u32, u32)> {
        let of_heads = |heads: u64| {
            let fits = move |world: &u32| heads.is_multiple_of(u64::from(*world)) || u64::from(*world).is_multiple_of(heads);
            let worlds: Vec<u32> = (1..=6).filter(fits).collect();
            let world = proptest::sample::select(worlds);
            (Just(heads), any::<bool>(), world.clone(), world, 1_u32..4, 1_u32..9, 2_u32..40)
        };
        (1_u64..7).prop_flat_map(of_heads)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

        #[test]
        fn pages_of_any_shape_are_equal_over_other_ranks((heads, tokens_first, from, to, layers, block_tokens, count) in shape()) {
            runtime().block_on(async {
                let host = host().await;
                let of = |name: &str, world: u32| {
                    let group = Group { heads: Some(Heads::new(heads, tokens_first)), token_bytes: 16, layers, block_tokens, ..Group::opaque("main") };
                    let mut spec = spec(name, world);
                    spec.groups = vec![group];
                    spec
                };
                let a = Synthetic::start(&host.agent, of("a", from));
                a.add("s", &tokens(count));
                paint(&a, "s");
                capture(&host, "a", "s").await;
                let b = Synthetic::start(&host.agent, of("b", to));
                let sequence = restore(&host, "b", "a", true).await.unwrap().sequence.unwrap();
                check(&b, &sequence);
            });
        }
    }
}
