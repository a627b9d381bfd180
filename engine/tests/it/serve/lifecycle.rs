//! Pauses, and agents that come and go.

use super::agent::Agent;
use super::process::{Process, prompt};
use pfr_schema::ErrorCode;
use pfr_schema::engine::{Allocate, Allocated, CallError, PauseRequest, PinRequest, Pinned, ResumeRequest, Resumed, ToEngine};
use serde_json::json;
use tempfile::tempdir;

#[test]
fn a_paused_engine_makes_no_step_until_it_is_told_to() {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached("hybrid", &agent.socket, &[]);
    let mut member = agent.accept();
    let (first, second) = (engine.open(&prompt(20)), engine.open(&prompt(10)));
    for sequence in [&first, &second] {
        // Not so fast that it is done before it is told to pause.
        engine.send(&json!({"generate": {"sequence": sequence, "count": 60, "delay_ms": 20}}));
    }
    engine.steps(6);
    member.pause();
    member.pause();
    while engine.line().get("paused").is_none() {}
    // Each question is a chance to make a step too many.
    let at = member.table(&first).boundary;
    let memory = engine.memory();
    engine.send(&json!({"open": {"tokens": [1, 2, 3]}}));
    for _ in 0..20 {
        engine.send(&json!({"memory": {}}));
        assert_eq!(engine.line(), json!({"memory": memory}), "nothing moves, nothing else is said");
        assert_eq!(member.table(&first).boundary, at);
    }
    member.resume();
    assert_eq!(engine.line(), json!({"resumed": {}}));
    assert_eq!(engine.line()["opened"]["sequence"], "seq-3", "what was held back comes first");
    let rest: Vec<_> = [engine.expect("generated"), engine.expect("generated")].into();
    assert!(rest.iter().all(|done| done["count"] == 60));
    assert_eq!(engine.ask(&json!({"tokens": {"sequence": first}}), "tokens")["boundary"], 80);
}

#[test]
fn a_pause_that_lasts_too_long_ends_by_itself_and_says_so() {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached("hybrid", &agent.socket, &[]);
    let mut member = agent.accept();
    let sequence = engine.open(&prompt(20));
    let pause = |name: &str, limit_ms| ToEngine::Pause(PauseRequest { pause: name.into(), limit_ms });
    let resume = |name: &str| ToEngine::Resume(ResumeRequest { pause: name.into() });
    member.tell(pause("first", 50));
    engine.send(&json!({"generate": {"sequence": sequence, "count": 3}}));
    // No word of the agent any more, as if it were stopped.
    engine.expect("resumed");
    engine.expect("generated");
    assert!(!member.call::<Resumed>(resume("first")).held);
    member.tell(pause("second", 600_000));
    assert!(!member.call::<Resumed>(resume("first")).held, "a late call does not end another pause");
    assert!(member.call::<Resumed>(resume("second")).held);
    assert!(member.call::<Resumed>(resume("second")).held, "the answer may have been lost");
}

#[test]
fn steps_are_taken_in_turn_and_stop_when_told() {
    let mut engine = Process::start(&["--model", "hybrid", "--blocks", "64"]);
    let names = [engine.open(&prompt(5)), engine.open(&prompt(6)), engine.open(&prompt(7))];
    for name in &names {
        // So long that it does not end by itself.
        engine.send(&json!({"generate": {"sequence": name, "count": 1_000_000, "delay_ms": 1}}));
    }
    let mut seen = [0; 3];
    while seen.iter().any(|n| *n < 5) {
        let token = engine.expect("token");
        seen[names.iter().position(|name| token["sequence"] == **name).unwrap()] += 1;
    }
    for name in &names {
        engine.send(&json!({"stop": {"sequence": name}}));
        let done = engine.expect("generated");
        assert!(done["sequence"] == **name && done["count"].as_u64().unwrap() >= 5);
    }
    // Alone and in company, each goes the same way.
    let tokens = engine.ask(&json!({"tokens": {"sequence": names[1]}}), "tokens");
    let all: Vec<u64> = tokens["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    let mut alone = Process::start(&["--model", "hybrid", "--blocks", "64", "--placement", "1"]);
    let name = alone.open(&prompt(6));
    let steps = alone.generate(&name, all.len() as u64 - 7);
    assert_eq!(steps.iter().map(|step| step.token).collect::<Vec<_>>(), all[7..]);
    assert!(steps.iter().any(|step| step.token != steps[0].token), "a model that says one thing only proves little");
    engine.quit();
}

#[test]
fn what_is_appended_is_as_if_it_had_been_in_the_prompt() {
    for model in ["hybrid", "smollm2"] {
        let mut engine = Process::start(&["--model", model, "--blocks", "64"]);
        let seq = engine.open(&prompt(20));
        engine.generate(&seq, 7);
        let more = prompt(9);
        let appended = engine.ask(&json!({"append": {"sequence": seq, "tokens": more}}), "appended");
        let tokens: Vec<u32> = serde_json::from_value(appended["tokens"].clone()).unwrap();
        assert_eq!((tokens.len(), &tokens[28..37]), (20 + 7 + 1 + 9 + 1, &more[..]));
        let whole = engine.open(&tokens[..37]);
        assert_eq!(engine.generate(&seq, 10), engine.generate(&whole, 10), "{model}");
        // An append that is refused changes nothing.
        for wrong in [json!({"append": {"sequence": seq}}), json!({"append": {"sequence": seq, "tokens": [1 << 20]}})] {
            assert_eq!(engine.ask(&wrong, "error")["code"], "invalid_request");
        }
        assert_eq!(engine.generate(&seq, 3), engine.generate(&whole, 3), "{model}");
        engine.quit();
    }
}

#[test]
fn a_dead_agent_stops_nothing_and_a_new_one_is_found() {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached("hybrid", &agent.socket, &["--dirty", "2"]);
    let mut member = agent.accept();
    engine.expect("attached");
    let seq = engine.open(&prompt(40));
    engine.start_generating(&seq, 100);
    engine.steps(3);
    member.pause();
    let _: Pinned = member.call(ToEngine::Pin(PinRequest { sequence: seq.clone() }));
    let _: Allocated = member.call(ToEngine::Allocate(Box::new(Allocate { tokens: prompt(33), boundary: 32, ..Allocate::default() })));
    // The agent dies, with its socket.
    drop(member);
    drop(agent);
    engine.expect("detached");
    engine.expect("resumed");
    engine.expect("generated");
    engine.ask(&json!({"free": {"sequence": seq}}), "freed");
    let memory = engine.memory();
    assert!(memory["used"].as_object().unwrap().values().all(|blocks| *blocks == json!([])), "pins and allocations are gone: {memory}");

    std::fs::remove_file(dir.path().join("agent.sock")).unwrap();
    let agent = Agent::listen(dir.path());
    let mut member = agent.accept();
    engine.expect("attached");
    let seq = engine.open(&prompt(4));
    member.pause();
    assert_eq!(member.table(&seq).boundary, 4);
    assert_eq!(member.capture(&seq).bytes.len(), 4 + 2 + 6, "the memory came along again");
}

#[test]
fn a_refused_engine_says_so_and_tries_again() {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached("hybrid", &agent.socket, &["--world", "2", "--rank-override", "1"]);
    agent.refuse(CallError { code: ErrorCode::RankMismatch, detail: "who are you".into() });
    assert_eq!(engine.expect("refused"), json!({"code": "rank_mismatch", "detail": "who are you"}));
    let member = agent.accept();
    assert_eq!((member.register.world, member.register.rank), (2, 1));
    engine.expect("attached");
}

#[test]
fn commands_that_cannot_be_done_are_told() {
    let mut engine = Process::start(&["--model", "hybrid", "--blocks", "4", "--seed", "5"]);
    for (command, kind, code) in [
        (json!({"open": {}}), "open", "invalid_request"),
        (json!({"open": {"text": ""}}), "open", "invalid_request"),
        (json!({"open": {"tokens": [512]}}), "open", "invalid_request"),
        (json!({"open": {"text": "x".repeat(65)}}), "open", "no_room"),
        (json!({"free": {"sequence": "seq-7"}}), "free", "sequence_unknown"),
        (json!({"poke": {"group": "main", "block": 4, "byte": 0}}), "poke", "invalid_request"),
        (json!({"dance": {}}), "line", "invalid_request"),
        (json!([]), "line", "invalid_request"),
    ] {
        let error = engine.ask(&command, "error");
        assert_eq!((&error["command"], &error["code"]), (&json!(kind), &json!(code)), "{command}: {error}");
    }
    let memory = engine.memory();
    assert_eq!(memory["free"], json!({"main": 4, "window": 3, "state": 4}));
    // Generation ends where memory does, and the sequence stays.
    let seq = engine.ask(&json!({"open": {"text": "abc"}}), "opened")["sequence"].clone();
    engine.send(&json!({"generate": {"sequence": seq, "count": 100}}));
    assert_eq!(engine.expect("error")["code"], "no_room");
    // Token 48 sees 9..=48, so its window needs a fourth block, and there are three besides the
    // null block.
    assert_eq!(engine.expect("generated")["count"], 45);
    assert_eq!(engine.ask(&json!({"tokens": {"sequence": seq}}), "tokens")["boundary"], 48);
    let other = Process::start(&["--model", "hybrid", "--blocks", "4", "--seed", "6"]);
    assert_ne!(other.ready["fingerprint"], engine.ready["fingerprint"], "other weights, other deployment");
    engine.quit();
    other.quit();
}
