//! A restored engine continues bit for bit like the captured one: tokens and logits.

use pfr_tests::{Host, Model, Registry};

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
    resume_elsewhere(Model::Dense, 37, 6, 8);
}

#[test]
fn a_dense_engine_resumes_at_the_end_of_a_block() {
    resume_elsewhere(Model::Dense, 40, 8, 8);
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

#[test]
fn forked_branches_resume_each_on_its_own_way() {
    for model in [Model::Hybrid, Model::Dense] {
        let registry = Registry::start();
        let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
        let mut here = a.engine("here", model, &[]);
        let trunk = here.open(&model.prompt(40));
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
        assert_eq!(report["boundary"], 45);
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
