//! Agent, engine or registry die during a capture or a restore: the engine goes on, nothing
//! incomplete becomes visible, and the next attempt works.

use pfr_tests::{Host, Model, Registry, SmallDisk, seed, wait_for};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use std::time::{Duration, Instant};

/// Kills something after a random part of the time that the work takes, and gives back what the
/// work said.
fn interrupted(mut work: std::process::Child, after: Duration, kill: impl FnOnce()) -> bool {
    let start = Instant::now();
    wait_for("the moment to kill", 60, || (start.elapsed() >= after || work.try_wait().unwrap().is_some()).then_some(()));
    kill();
    work.wait().unwrap().success()
}

fn captures_of_a_killed_agent(rounds: usize) {
    let mut random = StdRng::seed_from_u64(seed());
    let registry = Registry::start();
    let mut host = Host::new(&registry.url());
    let model = Model::Hybrid;
    let mut alone = host.engine("alone", model, &[]);
    let sequence = alone.open(&model.prompt(200));
    let undisturbed = alone.generate(&sequence, rounds * 15);
    alone.kill();

    let mut engine = host.engine("e", model, &[]);
    let sequence = engine.open(&model.prompt(200));
    let mut seen = Vec::new();
    let mut acknowledged = Vec::new();
    for round in 0..rounds {
        engine.begin(&sequence, 15, 0);
        let tag = format!("team/agent:round-{round}");
        let work = host.pf.command(&["snapshot", "e", &tag, "--sequence", &sequence, "--push", "never"]).spawn().unwrap();
        let after = Duration::from_micros(random.random_range(0..40_000));
        if interrupted(work, after, || host.kill_agent()) {
            acknowledged.push(tag);
        }
        seen.extend(engine.steps(&sequence, 15));
        host.start_agent();
        host.wait_for_engine("e");
    }
    assert_eq!(seen, undisturbed, "a capture that was cut changed what the engine says");
    // Every acknowledged snapshot is complete, and can be restored.
    println!("{} of {rounds} captures were acknowledged", acknowledged.len());
    for tag in &acknowledged {
        let output = host.pf.run(&["restore", tag, "e", "--local", "--json"]).ok();
        assert_eq!(output.json()["oracle"], true);
    }
}

#[test]
fn an_agent_killed_while_it_captures_leaves_an_engine_that_goes_on() {
    captures_of_a_killed_agent(4);
}

fn restores_of_a_killed_agent(rounds: usize) {
    let mut random = StdRng::seed_from_u64(seed());
    let registry = Registry::start();
    let mut host = Host::new(&registry.url());
    let model = Model::Hybrid;
    let mut engine = host.engine("e", model, &[]);
    let sequence = engine.open(&model.prompt(200));
    host.snapshot("e", "team/agent:x", &["--sequence", &sequence]);
    for _ in 0..rounds {
        let before = engine.fingerprint();
        let work = host.pf.command(&["restore", "team/agent:x", "e"]).spawn().unwrap();
        let after = Duration::from_micros(random.random_range(0..40_000));
        let done = interrupted(work, after, || host.kill_agent());
        if !done {
            // Either the sequence was activated and only the answer was lost, or nothing of it is
            // left.
            let nothing_left = wait_for("the engine to notice", 30, || {
                if engine.fingerprint() == before { Some(true) } else { (engine.sequences().len() > 1).then_some(false) }
            });
            println!("killed after {after:?}: {}", if nothing_left { "nothing is left" } else { "it runs, only the answer was lost" });
        }
        for other in engine.sequences() {
            if other != sequence {
                engine.free(&other);
            }
        }
        host.start_agent();
        host.wait_for_engine("e");
    }
    host.restore("team/agent:x", "e");
}

#[test]
fn an_agent_killed_while_it_restores_leaves_an_engine_as_it_was() {
    restores_of_a_killed_agent(4);
}

fn captures_of_a_killed_engine(rounds: usize) {
    let mut random = StdRng::seed_from_u64(seed());
    let registry = Registry::start();
    let host = Host::new(&registry.url());
    let model = Model::Hybrid;
    for round in 0..rounds {
        let name = format!("e-{round}");
        let mut engine = host.engine(&name, model, &[]);
        let sequence = engine.open(&model.prompt(300));
        engine.begin(&sequence, 50, 1);
        let tag = format!("team/agent:{name}");
        let work = host.pf.command(&["snapshot", &name, &tag, "--sequence", &sequence, "--push", "wait"]).spawn().unwrap();
        let after = Duration::from_micros(random.random_range(0..40_000));
        let done = interrupted(work, after, || engine.kill());
        let visible = host.pf.tags("team/agent").contains_key(&name);
        assert!(visible || !done, "acknowledged and not there");
        // The agent is well, and holds nothing of the engine.
        wait_for("the engine to be forgotten", 30, || {
            let engines = host.pf.json(&["engines"]);
            engines["engines"].as_array().unwrap().is_empty().then_some(())
        });
        if visible {
            host.engine("check", model, &[]).kill();
        }
    }
}

#[test]
fn an_engine_killed_while_it_is_captured_costs_nothing_but_the_capture() {
    captures_of_a_killed_engine(3);
}

#[test]
fn a_capture_waits_for_a_registry_that_is_away_and_survives_the_agent() {
    let mut registry = Registry::start();
    let mut host = Host::new(&registry.url());
    let model = Model::Hybrid;
    let mut engine = host.engine("e", model, &[]);
    let sequence = engine.open(&model.prompt(100));
    registry.kill();
    let report = host.pf.json(&["snapshot", "e", "team/agent:x", "--sequence", &sequence]);
    assert_ne!(report["push"]["state"], "done", "{report}");
    // The engine has long gone on; the agent is killed and comes back; the push is still to be
    // done.
    engine.generate(&sequence, 5);
    host.kill_agent();
    host.start_agent();
    registry.restart();
    wait_for("the push to arrive", 90, || host.pf.tags("team/agent").contains_key("x").then_some(()));
    host.pf.run(&["verify", "team/agent:x"]).ok();
}

#[test]
fn a_full_disk_refuses_the_capture_and_the_engine_goes_on() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 3) else { return };
    let registry = Registry::start();
    let host = Host::over(&registry.url(), &disk.path().join("agent"), &[]);
    let mut engine = host.engine("e", Model::Dense, &[]);
    let sequence = engine.open(&Model::Dense.prompt(150));
    let output = host.pf.run(&["snapshot", "e", "team/agent:x", "--sequence", &sequence]);
    assert_eq!((output.code, host.last_problem().as_str()), (8, "no_room"), "{output:?}");
    assert!(output.stderr.contains("disk"), "{output:?}");
    assert!(host.pf.tags("team/agent").is_empty());
    engine.generate(&sequence, 2);
}

#[test]
fn a_ring_smaller_than_a_page_is_said_before_anything_begins() {
    let registry = Registry::start();
    let host = Host::with(&registry.url(), &["--ring-bytes", "65536"]);
    let mut engine = host.engine("e", Model::Dense, &[]);
    let sequence = engine.open(&Model::Dense.prompt(20));
    let before = engine.fingerprint();
    let output = host.pf.run(&["snapshot", "e", "team/agent:x", "--sequence", &sequence, "--json"]);
    assert_eq!(output.code, 8, "{output:?}");
    assert!(output.stderr.contains("ring") && output.stderr.contains("184320"), "{output:?}");
    assert_eq!(engine.fingerprint(), before);
    engine.generate(&sequence, 2);
}

mod long {
    use super::{captures_of_a_killed_agent, captures_of_a_killed_engine, restores_of_a_killed_agent};

    #[test]
    fn an_agent_killed_while_it_captures_leaves_an_engine_that_goes_on() {
        captures_of_a_killed_agent(40);
    }

    #[test]
    fn an_agent_killed_while_it_restores_leaves_an_engine_as_it_was() {
        restores_of_a_killed_agent(40);
    }

    #[test]
    fn an_engine_killed_while_it_is_captured_costs_nothing_but_the_capture() {
        captures_of_a_killed_engine(40);
    }
}
