//! The answer to each call of the agent.

use super::agent::{Agent, Member, named, oracle, parts};
use super::process::{Process, prompt};
use pfr_schema::ErrorCode;
use pfr_schema::engine::{
    Allocate, Allocated, MemoryKind, OracleRequest, PROTOCOL, PinRequest, Pinned, Table, TableRequest, ToEngine, Verb,
};
use pfr_schema::tree::GroupKind;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use tempfile::tempdir;

fn start(model: &str, arguments: &[&str]) -> (Process, Member, tempfile::TempDir) {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached(model, &agent.socket, arguments);
    let member = agent.accept();
    let attached = engine.expect("attached");
    assert_eq!(attached["fingerprint"], engine.ready["fingerprint"]);
    (engine, member, dir)
}

#[test]
fn a_registration_says_where_every_block_is() {
    for (model, groups) in [("smollm2", vec!["main"]), ("hybrid", vec!["main", "window", "state"])] {
        let (engine, member, _dir) =
            start(model, &["--name", "a", "--deployment", "quantization=q4", "--deployment", "graph_buckets=[1,2]"]);
        let register = &member.register;
        assert_eq!((register.protocol, register.engine.as_str(), register.world, register.rank), (PROTOCOL, "a", 1, 0));
        assert_eq!(register.verbs, [Verb::Pause, Verb::Table, Verb::Pin, Verb::Oracle, Verb::Allocate]);
        assert_eq!(register.deployment["weights"], engine.ready["weights"]);
        assert_eq!((&register.deployment["quantization"], &register.deployment["graph_buckets"]), (&json!("q4"), &json!([1, 2])));
        assert_eq!(register.groups.iter().map(|group| group.name.as_str()).collect::<Vec<_>>(), groups);
        let mut taken = Vec::new();
        for group in &register.groups {
            let recurrent = group.kind == GroupKind::Recurrent;
            assert_eq!(
                (group.components.is_empty(), group.geometry.is_none(), group.states.is_empty()),
                (recurrent, recurrent, !recurrent)
            );
            if let Some(geometry) = group.geometry {
                let page = geometry.page_bytes(&pfr_schema::Limits::default()).unwrap();
                assert!(group.components.iter().all(|c| c.parts.iter().map(|p| p.bytes).sum::<u64>() == page));
            }
            for part in parts(group) {
                let memory = register.memories.iter().find(|memory| memory.name == part.memory).unwrap();
                assert_eq!(memory.kind, MemoryKind::PosixShm);
                for block in 0..u64::from(group.blocks) {
                    let start = part.offset + block * part.block_stride;
                    assert!(start + part.bytes <= memory.bytes);
                    taken.push((&part.memory, start, start + part.bytes));
                }
            }
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|two| two[0].0 != two[1].0 || two[0].2 <= two[1].1), "no two blocks overlap");
        engine.quit();
    }
}

#[test]
fn the_table_has_every_sequence_with_its_columns() {
    let (mut engine, mut member, _dir) = start("hybrid", &["--placement", "2", "--salt", "tenant", "--adapter", "lora-1"]);
    let (first, second) = (engine.open(&prompt(70)), engine.open(&prompt(16)));
    let fork = engine.ask(&json!({"fork": {"sequence": first}}), "opened")["sequence"].as_str().unwrap().to_owned();
    member.pause();
    let table: Table = member.call(ToEngine::Table(TableRequest::default()));
    assert_eq!(table.sequences.iter().map(|s| s.id.clone()).collect::<Vec<_>>(), [first.clone(), second.clone(), fork]);
    let [long, short, fork] = &table.sequences[..] else { panic!() };
    assert_eq!((long.boundary, long.tokens.len(), short.boundary, short.tokens.len()), (70, 71, 16, 17));
    assert_eq!(long.tokens[..70], prompt(70));
    assert_eq!((long.salt.as_str(), long.adapter.as_deref()), ("tenant", Some("lora-1")));
    assert!(long.unrecorded.is_empty());
    assert_eq!((long.blocks["main"].len(), long.blocks["window"].len(), long.blocks["state"].len()), (5, 5, 1));
    // Token 70 attends to tokens 31..=70: column 0 is outside the window, column 1 holds token 31.
    let null: Vec<bool> = long.blocks["window"].iter().map(|block| *block == 0).collect();
    assert_eq!(null, [true, false, false, false, false]);
    assert_eq!((short.blocks["main"].len(), short.blocks["window"].len()), (1, 1));
    // The fork shares pages, but not state.
    assert_eq!((&fork.blocks["main"], &fork.blocks["window"]), (&long.blocks["main"], &long.blocks["window"]));
    let states: BTreeSet<u32> = table.sequences.iter().map(|s| s.blocks["state"][0]).collect();
    assert_eq!(states.len(), 3);
    // The engine counts a block of several sequences once. The table has every block in use.
    let used = engine.memory()["used"].clone();
    for group in ["main", "window", "state"] {
        let held: BTreeSet<u32> = table.sequences.iter().flat_map(|s| s.blocks[group].clone()).collect();
        let null = member.group(group).null_block;
        assert_eq!(used[group], json!(held.into_iter().filter(|b| Some(*b) != null).collect::<Vec<_>>()), "{group}");
    }
    // The fork copies the last page before it writes to it.
    member.resume();
    engine.generate(&fork.id, 1);
    member.pause();
    let (long, fork) = (member.table(&first), member.table(&fork.id));
    assert_eq!(long.blocks["main"][..4], fork.blocks["main"][..4]);
    assert_ne!(long.blocks["main"][4], fork.blocks["main"][4]);
}

#[test]
fn calls_at_the_wrong_time_or_for_an_unknown_sequence_are_refused() {
    let (mut engine, mut member, _dir) = start("hybrid", &[]);
    let seq = engine.open(&prompt(3));
    let code = |result: Result<Value, pfr_schema::engine::CallError>| result.unwrap_err().code;
    let pin = |sequence: &str| ToEngine::Pin(PinRequest { sequence: sequence.into() });
    assert_eq!(code(member.try_call(ToEngine::Table(TableRequest::default()))), ErrorCode::InvalidRequest);
    assert_eq!(code(member.try_call(pin(&seq))), ErrorCode::InvalidRequest);
    member.resume();
    member.pause();
    for unknown in ["seq-9", "seq-01", "seq-1 ", "", "x"] {
        let only = TableRequest { sequence: Some(unknown.into()) };
        assert_eq!(code(member.try_call(ToEngine::Table(only))), ErrorCode::SequenceUnknown, "{unknown:?}");
        assert_eq!(code(member.try_call(pin(unknown))), ErrorCode::SequenceUnknown);
        assert_eq!(code(member.try_call(ToEngine::Activate(named(unknown)))), ErrorCode::SequenceUnknown);
        assert_eq!(member.oracle(unknown, 3).top, []);
    }
    assert_eq!(code(member.try_call(ToEngine::Discard(named(&seq)))), ErrorCode::SequenceUnknown, "a running sequence cannot be discarded");
    assert_eq!(code(member.try_call(ToEngine::Unpin(Pinned { pin: 77 }))), ErrorCode::InvalidRequest);
    member.resume();
    assert_eq!(member.oracle(&seq, 9).top, [], "the engine is idle: it will not compute that step");
    assert_eq!(member.oracle(&seq, 2).top.len(), 8, "the prompt's last step");
    let all: pfr_schema::engine::Oracle =
        member.call(ToEngine::Oracle(OracleRequest { sequence: seq.clone(), boundary: 3, top: u32::MAX }));
    assert_eq!(all.top.len(), pfr_engine::hybrid::VOCABULARY);
    let logit = |(_, bits): &(u32, u32)| f32::from_bits(*bits);
    assert!(all.top.windows(2).all(|two| logit(&two[0]) > logit(&two[1]) || two[0].0 < two[1].0), "highest logit first");
}

#[test]
fn an_allocation_is_checked_and_given_back() {
    let (mut engine, mut member, _dir) = start("hybrid", &["--dirty", "4"]);
    let before = engine.memory();
    let try_allocate = |member: &mut Member, tokens: Vec<u32>, boundary: u64, sampling: Value| {
        let sampling = serde_json::from_value(sampling).unwrap();
        member.try_call::<Allocated>(ToEngine::Allocate(Box::new(Allocate { tokens, boundary, sampling, ..Allocate::default() })))
    };
    for (tokens, boundary, sampling, code) in [
        (vec![], 0, json!({}), ErrorCode::InvalidRequest),
        (prompt(5), 0, json!({}), ErrorCode::InvalidRequest),
        (prompt(5), 5, json!({}), ErrorCode::InvalidRequest),
        (prompt(5), u64::MAX, json!({}), ErrorCode::InvalidRequest),
        (vec![1, 9999], 1, json!({}), ErrorCode::InvalidRequest),
        (prompt(9000), 1, json!({}), ErrorCode::InvalidRequest),
        (prompt(5), 4, json!({"temperature": 0.7}), ErrorCode::InvalidRequest),
        (prompt(5), 4, json!({"grammar": "json"}), ErrorCode::InvalidRequest),
        (prompt(24 * 16 + 2), 24 * 16 + 1, json!({}), ErrorCode::NoRoom),
    ] {
        let error = try_allocate(&mut member, tokens, boundary, sampling).unwrap_err();
        assert_eq!(error.code, code, "{}", error.detail);
    }
    assert_eq!(engine.memory(), before);
    let allocated = try_allocate(&mut member, prompt(71), 70, json!({"temperature": 0})).unwrap();
    assert_eq!(allocated.blocks["window"].iter().map(|b| *b == 0).collect::<Vec<_>>(), [true, false, false, false, false]);
    assert_eq!(engine.memory()["used"]["main"].as_array().unwrap().len(), 5);
    // The sequence cannot generate before it is activated.
    let error = engine.ask(&json!({"generate": {"sequence": allocated.sequence, "count": 1}}), "error");
    assert_eq!(error["code"], "sequence_unknown");
    member.pause();
    assert_eq!(member.call::<Table>(ToEngine::Table(TableRequest::default())).sequences, []);
    member.resume();
    member.tell(ToEngine::Discard(named(&allocated.sequence)));
    let again: Result<Value, _> = member.try_call(ToEngine::Activate(named(&allocated.sequence)));
    assert_eq!(again.unwrap_err().code, ErrorCode::SequenceUnknown);
    assert_eq!(engine.memory()["used"], before["used"]);
    // Computing the next step needs a block. With none left that is an error, not a wrong answer.
    let seq = engine.open(&prompt(23 * 16));
    let full = engine.open(&prompt(16));
    let refused: Result<Value, _> = member.try_call(oracle(&full, 16));
    assert_eq!(refused.unwrap_err().code, ErrorCode::NoRoom);
    engine.ask(&json!({"free": {"sequence": seq}}), "freed");
    assert_eq!(member.oracle(&full, 16).top.len(), 8);
}

#[test]
fn a_pin_keeps_sealed_blocks_after_the_sequence_is_freed() {
    let (mut engine, mut member, _dir) = start("hybrid", &["--dirty", "6"]);
    let seq = engine.open(&prompt(70));
    member.pause();
    let blocks = member.table(&seq).blocks;
    let before = member.bytes(&blocks);
    let pin: Pinned = member.call(ToEngine::Pin(PinRequest { sequence: seq.clone() }));
    member.resume();
    let split = |bytes: BTreeMap<(String, usize, usize), Vec<u8>>| -> (BTreeMap<_, _>, BTreeMap<_, _>) {
        bytes.into_iter().partition(|((group, column, _), _)| group != "state" && *column < 4)
    };
    let (sealed, open) = split(before);
    // As in real engines, the sequence may still write to its open blocks, pinned or not: only a
    // copy of them stays as it was.
    engine.generate(&seq, 1);
    let (still, changed) = split(member.bytes(&blocks));
    assert!(still == sealed && open.iter().all(|(key, bytes)| changed[key] != *bytes));
    // Its window moves on, it is freed, and another sequence takes all blocks.
    engine.generate(&seq, 40);
    engine.ask(&json!({"free": {"sequence": seq}}), "freed");
    let others = engine.open(&prompt(18 * 16));
    assert!(split(member.bytes(&blocks)).0 == sealed);
    member.tell(ToEngine::Unpin(pin));
    assert!(split(member.bytes(&blocks)).0 != sealed, "unpinned blocks are used again");
    engine.ask(&json!({"free": {"sequence": others}}), "freed");
    assert_eq!(engine.memory()["used"]["main"], json!([]));
}

#[test]
fn calls_of_verbs_that_were_switched_off_are_refused() {
    let (engine, mut member, _dir) = start("hybrid", &["--no-verb", "pin", "--no-verb", "oracle", "--no-verb", "allocate"]);
    assert_eq!(member.register.verbs, [Verb::Pause, Verb::Table]);
    for call in [
        ToEngine::Pin(PinRequest { sequence: "seq-1".into() }),
        oracle("seq-1", 1),
        ToEngine::Allocate(Box::new(Allocate { tokens: prompt(3), boundary: 1, ..Allocate::default() })),
    ] {
        assert_eq!(member.try_call::<Value>(call).unwrap_err().code, ErrorCode::EngineBusy);
    }
    engine.quit();
}
