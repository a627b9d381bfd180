//! State tensors restored into engines that hold them in another layout or type: the value is the
//! same, or nothing is written.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::Fault;
use crate::common::{Host, capture, host, restore, tokens, until};
use pfr_agent::engines::Answers as _;
use pfr_schema::agent::Converted;
use pfr_schema::checkpoint::{Checkpoint, Dtype, Form, Layout, value_hash};
use pfr_schema::engine::{Fill, Match, Matched, ToAgent, Verb};
use pfr_schema::{Digest, ErrorCode, Limits, media_type};

const SHAPE: [u64; 2] = [4, 6];
const STATES: [&str; 2] = ["layers.1.conv", "layers.1.ssm"];

fn affine(tag: &str, dtype: Dtype, strides: [i64; 2], offset: u64, elements: u64) -> Form {
    let layout = Layout { tag: tag.into(), strides: Some(strides.to_vec()), offset: Some(offset) };
    Form { storage_dtype: dtype, layout, bytes: elements * dtype.bytes() as u64 }
}

fn row_major() -> Form {
    affine("row-major", Dtype::F32, [6, 1], 0, 24)
}

fn opaque(tag: &str) -> Form {
    let layout = Layout { tag: tag.into(), strides: None, offset: None };
    Form { layout, ..row_major() }
}

/// Forms that hold the same values.
fn forms() -> Vec<Form> {
    vec![
        row_major(),
        affine("another name", Dtype::F32, [6, 1], 0, 24),
        affine("column-major", Dtype::F32, [1, 4], 0, 24),
        affine("padded-rows", Dtype::F32, [8, 1], 2, 34),
        affine("backwards", Dtype::F32, [-6, -1], 23, 24),
        affine("every-other", Dtype::F32, [12, 2], 1, 48),
        affine("row-major", Dtype::Bf16, [6, 1], 0, 24),
        affine("padded-columns", Dtype::Bf16, [1, 5], 1, 32),
        affine("row-major", Dtype::F64, [6, 1], 0, 24),
    ]
}

/// An engine with pages, and two states of this form.
fn spec(name: &str, form: Form) -> Spec {
    let states = &[(STATES[0], 24), (STATES[1], 24)];
    let state = Group { blocks: 32, form: Some((SHAPE.to_vec(), form)), ..Group::recurrent("mamba", states) };
    Spec::with(name, vec![Group::flat("main"), state])
}

/// Numbers that all types of `forms` hold, the odd ones among them.
fn values(state: usize) -> Vec<f32> {
    let odd = [-0.0, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fc0_0000), f32::from_bits(0x0001_0000), -1.5];
    let rest = (0..18).map(|i| (i as f32 + 1.0) * if state == 0 { 0.5 } else { -4.0 });
    odd.into_iter().chain(rest).collect()
}

/// The bytes of a form that holds the values, by the definition; other bytes are `between`.
fn held(values: &[f32], form: &Form, between: u8) -> Vec<u8> {
    let mut bytes = vec![between; form.bytes as usize];
    let (strides, offset) = (form.layout.strides.as_ref().unwrap(), form.layout.offset.unwrap() as i64);
    for (linear, value) in (0..).zip(values) {
        let place = (offset + linear / 6 * strides[0] + linear % 6 * strides[1]) as usize;
        let element = match form.storage_dtype {
            Dtype::F32 => value.to_bits().to_le_bytes().to_vec(),
            Dtype::Bf16 => ((value.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
            Dtype::F64 => f64::from(*value).to_bits().to_le_bytes().to_vec(),
            other => panic!("{other}"),
        };
        bytes[place * element.len()..][..element.len()].copy_from_slice(&element);
    }
    bytes
}

/// Adds a sequence whose states have these bytes.
fn add(engine: &Synthetic, name: &str, bytes: impl Fn(usize) -> Vec<u8>) {
    engine.add(name, &tokens(11));
    for (number, state) in STATES.into_iter().enumerate() {
        engine.memories[0].put(engine.state_span(name, state).offset, bytes(number));
    }
}

fn live(engine: &Synthetic, sequence: &str, state: &str) -> Vec<u8> {
    engine.memories[0].get(engine.state_span(sequence, state))
}

async fn checkpoint(host: &Host, digest: &Digest) -> Checkpoint {
    let store = host.agent.store();
    let manifest = store.manifest(digest).await.unwrap();
    let layer = manifest.layers_of(media_type::CHECKPOINT).next().unwrap();
    Checkpoint::parse(&store.read(&layer.digest).await.unwrap(), &Limits::default()).unwrap()
}

#[tokio::test]
async fn a_value_comes_back_in_every_form_from_every_form() {
    let host = host().await;
    let mut engines = Vec::new();
    for (number, form) in forms().into_iter().enumerate() {
        let engine = Synthetic::start(&host.agent, spec(&format!("e{number}"), form.clone()));
        add(&engine, "s", |state| held(&values(state), &form, 0xab));
        let digest = capture(&host, &format!("e{number}"), &format!("form-{number}")).await;
        engines.push((engine, form, checkpoint(&host, &digest).await));
    }
    for (number, (_, stored, checkpoint)) in engines.iter().enumerate() {
        for (target, (engine, form, _)) in engines.iter().enumerate() {
            let what = format!("{stored} to {form}");
            let report = restore(&host, &format!("e{target}"), &format!("form-{number}")).await.unwrap();
            let sequence = report.sequence.unwrap();
            assert_eq!((report.values_computed, report.values_attested, report.oracle), (2, 0, true), "{what}");
            let same = form.reads_as(stored);
            let converted = |state: &str| Converted { state: state.into(), rank: 0, from: stored.clone(), to: form.clone() };
            let expected = if same { Vec::new() } else { STATES.map(converted).to_vec() };
            assert_eq!(report.converted, expected, "{what}");
            for (state, name) in STATES.into_iter().enumerate() {
                let bytes = live(engine, &sequence, name);
                assert_eq!(bytes, held(&values(state), form, if same { 0xab } else { 0 }), "{what}");
                let tensor = checkpoint.tensors.iter().find(|tensor| tensor.name == name).unwrap();
                let found = value_hash(&tensor.kind, Dtype::F32, &SHAPE, form.storage_dtype, &form.layout, &bytes);
                assert_eq!(found.unwrap(), tensor.value_hash, "{what}");
            }
        }
    }
    // One value, many payloads.
    let hashes = |pick: fn(&Checkpoint) -> String| engines.iter().map(|(.., c)| pick(c)).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(hashes(|c| c.tensors[0].value_hash.to_string()).len(), 1);
    assert_eq!(hashes(|c| c.tensors[0].payload_hash.to_string()).len(), forms().len() - 1);
}

#[tokio::test]
async fn a_form_that_cannot_hold_the_value_is_refused_by_name_and_nothing_is_touched() {
    let host = host().await;
    let plain = Synthetic::start(&host.agent, spec("plain", row_major()));
    // Of the second state, the element [2, 3]: eleven bits, of which bf16 has eight.
    let inexact = |state: usize| {
        let mut values = values(state);
        values[15] = if state == 1 { 1.0 + 1.0 / 1024.0 } else { values[15] };
        held(&values, &row_major(), 0)
    };
    add(&plain, "s", inexact);
    capture(&host, "plain", "plain").await;
    let vendor = Synthetic::start(&host.agent, spec("vendor", opaque("vendor")));
    add(&vendor, "s", inexact);
    capture(&host, "vendor", "vendor").await;

    let column_major = affine("column-major", Dtype::F32, [1, 4], 0, 24);
    let mut shared = spec("shared", column_major.clone());
    shared.groups[1].one_part = true;
    for (tag, spec, code, words) in [
        (
            "plain",
            spec("narrow", affine("row-major", Dtype::Bf16, [6, 1], 0, 24)),
            ErrorCode::InexactStorage,
            r#"tensor "layers.1.ssm", element [2, 3]: 1.0009765625e0 in f32 cannot be represented in bf16"#,
        ),
        (
            "plain",
            spec("overlapping", affine("broadcast", Dtype::F32, [0, 1], 0, 24)),
            ErrorCode::GeometryMismatch,
            "layers.1.conv: layout.strides: elements that do not overlap expected",
        ),
        ("plain", shared, ErrorCode::GeometryMismatch, r#"it shares bytes with state "layers.1.ssm""#),
        ("plain", spec("blind", opaque("vendor")), ErrorCode::GeometryMismatch, r#"state "layers.1.conv" of rank 0: layout"#),
        ("vendor", spec("plain-2", row_major()), ErrorCode::GeometryMismatch, r#"state "layers.1.conv" of rank 0: layout"#),
        ("vendor", spec("other-vendor", opaque("vendor-2")), ErrorCode::GeometryMismatch, "vendor-2"),
    ] {
        let name = spec.name.clone();
        let engine = Synthetic::start(&host.agent, spec);
        let free = engine.free_blocks("mamba");
        let error = restore(&host, &name, tag).await.unwrap_err();
        assert_eq!(error.code(), code, "{name}: {error}");
        assert!(error.to_string().contains(words), "{name}: {error}");
        assert_eq!((engine.journal(), engine.free_blocks("mamba")), (Vec::new(), free), "{name}: the engine was touched");
    }

    // The same snapshots where they can be held.
    let wide = Synthetic::start(&host.agent, spec("wide", column_major.clone()));
    let sequence = restore(&host, "wide", "plain").await.unwrap().sequence.unwrap();
    let mut expected = values(1);
    expected[15] = 1.0 + 1.0 / 1024.0;
    assert_eq!(live(&wide, &sequence, STATES[1]), held(&expected, &column_major, 0));
    let twin = Synthetic::start(&host.agent, spec("twin", opaque("vendor")));
    let report = restore(&host, "twin", "vendor").await.unwrap();
    assert_eq!((report.values_computed, report.values_attested, report.converted), (0, 2, Vec::new()));
    assert_eq!(live(&twin, &report.sequence.unwrap(), STATES[1]), inexact(1));
}

#[tokio::test]
async fn memory_that_does_not_keep_a_converted_state_is_found() {
    let host = host().await;
    let pageless = |name: &str, form: Form| {
        let mut spec = spec(name, form);
        // The first page of a write is spoilt: here that is a state.
        spec.groups.remove(0);
        spec
    };
    let engine = Synthetic::start(&host.agent, pageless("e", row_major()));
    add(&engine, "s", |state| held(&values(state), &row_major(), 0));
    capture(&host, "e", "now").await;
    // Spoilt in an element, and between elements.
    for form in [affine("column-major", Dtype::Bf16, [1, 4], 0, 24), affine("padded-rows", Dtype::F32, [8, 1], 2, 34)] {
        let name = format!("lies-{}", form.layout.tag);
        let lying = Synthetic::start(&host.agent, pageless(&name, form));
        lying.set(Fault::WritesLie);
        let error = restore(&host, &name, "now").await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::LiveMismatch, "{error}");
        until("the blocks are back", || lying.waiting().is_empty()).await;
        lying.heal();
        assert_eq!(restore(&host, &name, "now").await.unwrap().converted.len(), 2);
    }
}

#[tokio::test]
async fn an_engine_that_asks_gets_the_state_in_its_own_form() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, spec("e", row_major()));
    add(&engine, "s", |state| held(&values(state), &row_major(), 0));
    capture(&host, "e", "now").await;
    let form = affine("padded-columns", Dtype::Bf16, [1, 5], 1, 32);
    let mut asks = spec("asks", form.clone());
    asks.verbs = vec![Verb::Request];
    let asking = Synthetic::start(&host.agent, asks);
    asking.add("mine", &tokens(11));
    let report = restore(&host, "asks", "now").await.unwrap();
    assert_eq!(report.converted.iter().map(|c| (c.state.as_str(), &c.to)).collect::<Vec<_>>(), STATES.map(|state| (state, &form)));
    let handle = host.agent.engines().get("asks").unwrap();
    let request = Match { tokens: tokens(11), ..Match::default() };
    let answer = host.agent.answer(&handle, 0, ToAgent::Match(request)).await.unwrap();
    let Matched::Ready { restore, .. } = serde_json::from_value(answer).unwrap() else { panic!("nothing is ready") };
    let fill = Fill { restore, blocks: asking.sequence("mine").blocks, after: None, kept: 0, fill: None };
    host.agent.answer(&handle, 0, ToAgent::Fill(fill)).await.unwrap();
    for (number, state) in STATES.into_iter().enumerate() {
        assert_eq!(live(&asking, "mine", state), held(&values(number), &form, 0), "{state}");
    }
}
