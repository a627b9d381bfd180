//! A restored engine continues bit for bit like the captured one: tokens and logits.

use pfr_tests::{Host, Model, Registry};
use serde_json::json;

/// Captures on one host after `prompt + generated` tokens, restores on another, and compares the
/// next tokens and logits.
fn resume_elsewhere(model: Model, prompt: usize, generated: usize, next: usize) {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let mut here = a.engine("here", model, &["--placement", "1"]);
    let sequence = here.open(&model.prompt(prompt));
    here.generate(&sequence, generated);
    let report = a.snapshot("here", "team/agent:x", &["--sequence", &sequence]);
    assert_eq!(report["boundary"], prompt + generated, "{report}");
    assert_eq!(report["tokens"], prompt + generated + 1, "one token is chosen and not computed: {report}");
    assert_eq!(report["exactness"], "bit-exact");
    let uninterrupted = here.generate(&sequence, next);

    // Another process, an empty store, other blocks, memory full of garbage.
    let mut there = b.engine("there", model, &["--placement", "2", "--dirty", "7"]);
    let report = b.restore("team/agent:x", "there");
    assert_eq!(report["boundary"], prompt + generated, "{report}");
    assert_eq!(report["oracle"], true, "the first step was compared: {report}");
    let continued = there.generate(report["sequence"].as_str().unwrap(), next);
    assert_eq!(continued, uninterrupted, "{model:?} at {}", prompt + generated);
}

#[test]
fn a_dense_engine_resumes_in_the_middle_of_a_block() {
    resume_elsewhere(Model::Dense, 21, 6, 8);
}

#[test]
fn a_dense_engine_resumes_at_the_end_of_a_block() {
    resume_elsewhere(Model::Dense, 24, 8, 8);
}

#[test]
fn a_hybrid_engine_resumes_in_the_middle_of_a_block() {
    resume_elsewhere(Model::Hybrid, 75, 10, 40);
}

#[test]
fn a_hybrid_engine_resumes_at_the_end_of_a_block() {
    resume_elsewhere(Model::Hybrid, 90, 6, 40);
}

#[test]
fn a_hybrid_engine_resumes_before_its_window_is_full() {
    resume_elsewhere(Model::Hybrid, 9, 3, 60);
}

/// The fork's own tokens come from a cold engine too: equal logits prove the pages that were taken.
#[test]
fn a_prompt_that_parts_from_a_snapshot_resumes_at_the_page_before() {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let model = Model::Dense;
    let mut here = a.engine("here", model, &["--placement", "1"]);
    let sequence = here.open(&model.prompt(50));
    here.generate(&sequence, 13);
    let captured = a.snapshot("here", "team/agent:x", &["--sequence", &sequence]);

    let mut cold = a.engine("cold", model, &["--placement", "4"]);
    let mut there = b.engine("there", model, &["--placement", "2", "--dirty", "7"]);
    for (common, deepest) in [(38, 32), (17, 16), (49, 48)] {
        let mut prompt = model.prompt(56);
        prompt[common..].iter_mut().for_each(|token| *token = (*token + 57) % 400 + 1);
        let file = b.pf.path("prompt.json");
        std::fs::write(&file, serde_json::to_vec(&prompt).unwrap()).unwrap();
        let found = b.pf.json(&["match", "team/agent", "--tokens", file.to_str().unwrap(), "--engine", "there"]);
        assert_eq!((&found["digest"], &found["boundary"], &found["tokens"]), (&captured["digest"], &deepest.into(), &63.into()), "{found}");

        let reference = format!("team/agent@{}", found["digest"].as_str().unwrap());
        let report = b.pf.json(&["restore", &reference, "there", "--position", &deepest.to_string()]);
        assert_eq!((&report["boundary"], &report["oracle"]), (&deepest.into(), &false.into()), "{report}");
        let restored = report["sequence"].as_str().unwrap();
        // One token more is chosen, as in the snapshot.
        there.say(&json!({"append": {"sequence": restored, "tokens": prompt[deepest + 1..]}}));
        there.expect("appended");
        let opened = cold.open(&prompt);
        assert_eq!(there.generate(restored, 8), cold.generate(&opened, 8), "from {common} on it is another prompt");
    }

    let mut hybrid = a.engine("hybrid", Model::Hybrid, &[]);
    let sequence = hybrid.open(&Model::Hybrid.prompt(100));
    a.snapshot("hybrid", "team/hybrid:x", &["--sequence", &sequence]);
    let file = a.pf.path("prompt.json");
    std::fs::write(&file, serde_json::to_vec(&Model::Hybrid.prompt(90)).unwrap()).unwrap();
    let found = a.pf.run(&["match", "team/hybrid", "--tokens", file.to_str().unwrap(), "--engine", "hybrid"]);
    assert_eq!(found.code, 5, "recurrent state has one position: {found:?}");
    let refused = a.pf.run(&["restore", "team/hybrid:x", "hybrid", "--position", "64"]);
    assert_eq!(refused.code, 4, "{refused:?}");
}

#[test]
fn forked_branches_resume_each_on_its_own_way() {
    for (model, length) in [(Model::Hybrid, 40), (Model::Dense, 20)] {
        let registry = Registry::start();
        let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
        let mut here = a.engine("here", model, &[]);
        let trunk = here.open(&model.prompt(length));
        here.generate(&trunk, 5);
        a.snapshot("here", "team/agent:trunk", &["--sequence", &trunk]);
        let mut branches = Vec::new();
        for i in 0..3 {
            let fork = here.fork(&trunk);
            here.generate(&fork, 3 + 8 * i);
            a.snapshot("here", &format!("team/agent:branch-{i}"), &["--sequence", &fork]);
            branches.push(here.generate(&fork, 6));
        }
        let mut there = b.engine("there", model, &["--dirty", "3"]);
        for (i, uninterrupted) in branches.iter().enumerate() {
            let report = b.restore(&format!("team/agent:branch-{i}"), "there");
            let continued = there.generate(report["sequence"].as_str().unwrap(), 6);
            assert_eq!(&continued, uninterrupted, "{model:?}, branch {i}");
        }
        // Back in time: all branches share the pages of the trunk.
        let report = b.restore("team/agent:trunk", "there");
        assert_eq!(report["boundary"], length + 5);
    }
}

#[test]
fn an_engine_is_captured_while_it_generates_and_does_not_notice() {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let model = Model::Hybrid;
    let mut alone = a.engine("alone", model, &[]);
    let sequence = alone.open(&model.prompt(50));
    let undisturbed = alone.generate(&sequence, 200);

    let mut here = a.engine("here", model, &["--placement", "5"]);
    let sequence = here.open(&model.prompt(50));
    here.begin(&sequence, 200, 25);
    let mut seen = here.steps(&sequence, 20);
    let report = a.snapshot("here", "team/agent:live", &["--sequence", &sequence]);
    seen.extend(here.steps(&sequence, 180));
    assert_eq!(seen, undisturbed, "the capture changed what the engine says");

    let boundary = report["boundary"].as_u64().unwrap() as usize;
    assert!((70..250).contains(&boundary), "{report}");
    let mut there = b.engine("there", model, &["--dirty", "9"]);
    let restored = b.restore("team/agent:live", "there");
    let rest = 250 - boundary;
    let continued = there.generate(restored["sequence"].as_str().unwrap(), rest);
    assert_eq!(continued, undisturbed[200 - rest..]);
}

#[test]
fn a_reference_with_a_number_of_parents_restores_an_earlier_state() {
    let registry = Registry::start();
    let host = Host::new(&registry.url());
    let mut engine = host.engine("e", Model::Hybrid, &[]);
    let sequence = engine.open(&Model::Hybrid.prompt(30));
    let mut ways = Vec::new();
    for _ in 0..3 {
        host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
        ways.push(engine.generate(&sequence, 7));
    }
    for (back, way) in ways.iter().rev().enumerate() {
        let report = host.restore(&format!("team/agent:main~{back}"), "e");
        assert_eq!(&engine.generate(report["sequence"].as_str().unwrap(), 7), way, "{back} back");
    }
}
