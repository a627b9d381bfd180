//! State copied by hand from one process into another goes on bit for bit.

use super::agent::{Agent, Captured, Member, named, oracle};
use super::process::{Process, prompt};
use pfr_schema::engine::{Allocate, Allocated, Oracle, ResumeRequest, ToEngine};
use serde_json::json;
use tempfile::tempdir;

fn allocate(member: &mut Member, captured: &Captured) -> Allocated {
    let Captured { tokens, boundary, .. } = captured.clone();
    member.call(ToEngine::Allocate(Box::new(Allocate { tokens, boundary, ..Allocate::default() })))
}

/// Captures at these boundaries, and compares so many steps after each.
fn check(model: &str, boundaries: &[usize], steps: u64) {
    let (here, there) = (tempdir().unwrap(), tempdir().unwrap());
    let (agent, other) = (Agent::listen(here.path()), Agent::listen(there.path()));
    let mut source = Process::attached(model, &agent.socket, &["--placement", "3"]);
    let mut target = Process::attached(model, &other.socket, &["--placement", "8", "--dirty", "5"]);
    let (mut from, mut to) = (agent.accept(), other.accept());
    assert_eq!(from.register.deployment, to.register.deployment);
    for boundary in boundaries {
        let seq = source.open(&prompt(boundary - 4));
        let before = source.generate(&seq, 4);
        assert_eq!(before[3].boundary, *boundary as u64);

        from.pause();
        let captured = from.capture(&seq);
        assert_eq!((captured.boundary as usize, captured.tokens.len()), (*boundary, boundary + 1));
        from.resume();
        // Idle: the engine looks ahead without moving.
        let foreseen: Oracle = from.oracle(&seq, captured.boundary);
        let uninterrupted = source.generate(&seq, steps);
        assert_eq!(from.oracle(&seq, captured.boundary), foreseen, "the step after a pause is kept");
        assert_eq!(from.oracle(&seq, captured.boundary + 1).top, [], "others are not");

        let allocated = allocate(&mut to, &captured);
        to.fill(&allocated.blocks, &captured);
        let memory = target.memory();
        let name = &allocated.sequence;
        assert_eq!(to.oracle(name, captured.boundary), foreseen, "before it runs");
        assert_eq!(foreseen.top.len(), 8);
        assert_eq!(foreseen.top[0].0, uninterrupted[0].token as u32);
        assert_eq!(target.memory(), memory, "looking ahead left no trace");
        assert_eq!(target.ask(&json!({"sequences": {}}), "sequences"), json!([]), "it does not run yet");
        to.tell(ToEngine::Activate(named(name)));
        assert_eq!(target.expect("opened"), json!({"sequence": name, "tokens": captured.tokens}));
        let continued = target.generate(name, steps);
        assert_eq!(continued, uninterrupted, "{model} at {boundary}");

        // The pages that they have written since are the same, too.
        from.pause();
        to.pause();
        let (end, other_end) = (from.capture(&seq), to.capture(name));
        assert!(end.tokens == other_end.tokens && end.boundary == other_end.boundary);
        assert!(written(&from, &end) == written(&to, &other_end), "{model} at {boundary}: pages");
        from.resume();
        to.resume();
        source.ask(&json!({"free": {"sequence": seq}}), "freed");
        target.ask(&json!({"free": {"sequence": name}}), "freed");
    }
    let used = target.memory()["used"].clone();
    assert!(used.as_object().unwrap().values().all(|blocks| blocks == &json!([])), "{used}");
    source.quit();
    target.quit();
}

/// Captured bytes without those that belong to no value: padding between the elements of a state.
fn written(member: &Member, captured: &Captured) -> Vec<((String, usize, usize), Vec<u8>)> {
    let mut bytes = captured.bytes.clone();
    for group in &member.register.groups {
        for (i, state) in group.states.iter().enumerate() {
            let Some(block) = bytes.get_mut(&(group.name.clone(), 0, i)) else { continue };
            let size = if state.storage_dtype == "f32" { 4 } else { 2 };
            let strides = state.layout.strides.clone().unwrap();
            let mut places = vec![state.layout.offset.unwrap() as i64];
            for (length, stride) in state.shape.iter().zip(strides) {
                places = places.iter().flat_map(|place| (0..*length as i64).map(move |n| place + n * stride)).collect();
            }
            *block = places.iter().flat_map(|place| block[*place as usize * size..][..size].to_vec()).collect();
        }
    }
    bytes.into_iter().collect()
}

#[test]
fn a_dense_sequence_goes_on_in_another_process() {
    check("smollm2", &[21, 32], 18);
}

mod long {
    #[test]
    fn a_dense_sequence_goes_on_in_another_process() {
        super::check("smollm2", &[21, 32], 40);
    }
}

#[test]
fn a_hybrid_sequence_goes_on_in_another_process() {
    // Before the window is full, in the middle of a page, at its end, and where a column is about
    // to fall out.
    check("hybrid", &[5, 32, 48, 55, 56, 101], 40);
}

#[test]
fn a_sequence_caught_in_the_middle_of_generation_goes_on() {
    let (here, there) = (tempdir().unwrap(), tempdir().unwrap());
    let (agent, other) = (Agent::listen(here.path()), Agent::listen(there.path()));
    let mut source = Process::attached("hybrid", &agent.socket, &[]);
    let mut target = Process::attached("hybrid", &other.socket, &["--dirty", "1"]);
    let (mut from, mut to) = (agent.accept(), other.accept());
    let seq = source.open(&prompt(30));
    // Slow and with room to spare: it is stopped below, long before it ends.
    source.send(&json!({"generate": {"sequence": seq, "count": 300, "delay_ms": 10}}));
    source.steps(3);
    from.pause();
    let captured = from.capture(&seq);
    // These steps are yet to come; each answer comes after its step.
    let asked = [0, 3].map(|ahead| from.begin(oracle(&seq, captured.boundary + ahead)));
    let resumed = from.begin(ToEngine::Resume(ResumeRequest::default()));
    from.end::<serde_json::Value>(resumed).unwrap();
    let [scores, later]: [Oracle; 2] = asked.map(|id| from.end(id).unwrap());
    let mut after = Vec::new();
    while after.len() < 30 {
        after.extend(Some(source.step()).filter(|step| step.boundary > captured.boundary));
    }
    source.send(&json!({"stop": {"sequence": seq}}));
    source.expect("generated");
    assert_eq!([scores.top[0].0, later.top[0].0], [after[0].token as u32, after[3].token as u32]);

    let allocated = allocate(&mut to, &captured);
    to.fill(&allocated.blocks, &captured);
    assert_eq!(to.oracle(&allocated.sequence, captured.boundary), scores);
    to.tell(ToEngine::Activate(named(&allocated.sequence)));
    assert_eq!(target.generate(&allocated.sequence, after.len() as u64), after);
}

#[test]
fn one_wrong_byte_is_seen_in_the_scores() {
    let dir = tempdir().unwrap();
    let agent = Agent::listen(dir.path());
    let mut engine = Process::attached("hybrid", &agent.socket, &[]);
    let mut member = agent.accept();
    let seq = engine.open(&prompt(50));
    member.pause();
    let captured = member.capture(&seq);
    member.resume();
    let want = member.oracle(&seq, captured.boundary);
    for group in ["main", "window", "state"] {
        let allocated = allocate(&mut member, &captured);
        member.fill(&allocated.blocks, &captured);
        let name = &allocated.sequence;
        let block = *allocated.blocks[group].last().unwrap();
        assert_eq!(engine.ask(&json!({"poke": {"group": group, "block": block, "byte": 19}}), "poked"), json!({}));
        let found = member.oracle(name, captured.boundary);
        assert!(found != want && found.top.len() == 8, "{group}");
        member.tell(ToEngine::Discard(named(name)));
    }
}
