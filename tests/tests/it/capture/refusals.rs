//! A snapshot that does not fit an engine is refused with an error of its own, and the engine stays
//! as it was. (Forged documents and misbehaving memory are in the agent's own tests.)

use pfr_tests::{Engine, Host, Model, Proxy, Registry, Tamper, files, wait_for};

/// Two hosts, a captured engine on one, another engine to restore into.
struct Scene {
    registry: Registry,
    a: Host,
    b: Host,
    here: Engine,
}

fn scene(model: Model, options: &[&str]) -> Scene {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let mut here = a.engine("here", model, options);
    let sequence = here.open(&model.prompt(50));
    here.generate(&sequence, 3);
    a.snapshot("here", "team/agent:x", &["--sequence", &sequence]);
    Scene { registry, a, b, here }
}

/// Restores into an engine that does not fit. Returns the problem's code and the message.
fn refused(host: &Host, engine: &mut Engine, name: &str, reference: &str) -> (String, String) {
    let before = engine.fingerprint();
    let output = host.try_restore(reference, name);
    assert_ne!(output.code, 0, "{output:?}");
    assert_eq!(engine.fingerprint(), before, "the engine was touched: {output:?}");
    assert_eq!(output.code, 4, "{output:?}");
    (host.last_problem(), output.stderr)
}

#[test]
fn another_engine_configuration_is_refused_and_both_are_shown() {
    let scene = scene(Model::Hybrid, &[]);
    for (options, key) in [
        (&["--seed", "99"][..], "weights"),
        (&["--deployment", "backend=other-kernels"], "backend"),
        (&["--deployment", "quantization=int8"], "quantization"),
        (&["--deployment", "tp=2"], "tp"),
    ] {
        let name = format!("other-{key}");
        let mut engine = scene.b.engine(&name, Model::Hybrid, options);
        let (code, said) = refused(&scene.b, &mut engine, &name, "team/agent:x");
        assert_eq!(code, "fingerprint_mismatch", "{said}");
        assert!(said.contains(key), "{said}");
    }
}

#[test]
fn a_dense_engine_refuses_a_hybrid_snapshot_even_with_the_same_engine_configuration() {
    let claim = ["--deployment", "weights=sha256:0", "--deployment", "model=m"];
    let scene = scene(Model::Hybrid, &claim);
    let mut engine = scene.b.engine("dense", Model::Dense, &claim);
    let (code, said) = refused(&scene.b, &mut engine, "dense", "team/agent:x");
    assert!(["geometry_mismatch", "missing_group", "missing_state"].contains(&code.as_str()), "{said}");
}

#[test]
fn a_bit_that_flips_on_the_way_is_found() {
    let scene = scene(Model::Dense, &[]);
    // In the middle of a page: four pages of 2 × 184,320 bytes come in one answer, or in several.
    let proxy = Proxy::to(scene.registry.address(), Tamper::Flip(100_000));
    let host = Host::new(&proxy.url());
    let mut engine = host.engine("there", Model::Dense, &[]);
    let before = engine.fingerprint();
    let output = host.try_restore("team/agent:x", "there");
    assert_eq!(output.code, 4, "{output:?}");
    assert_eq!(engine.fingerprint(), before);
    // With an honest network the same engine takes it.
    scene.b.pf.run(&["engines"]).ok();
    let mut honest = scene.b.engine("there", Model::Dense, &[]);
    let report = scene.b.restore("team/agent:x", "there");
    honest.generate(report["sequence"].as_str().unwrap(), 1);
}

#[test]
fn a_bit_that_flips_in_the_local_store_is_found() {
    let mut scene = scene(Model::Hybrid, &[]);
    let host = &scene.a;
    let packs = host.data().join("store/packs");
    let mut flipped = 0;
    for (name, mut bytes) in files(&packs) {
        if bytes.len() > 50_000 {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(packs.join(name), bytes).unwrap();
            flipped += 1;
        }
    }
    assert!(flipped > 0);
    let before = scene.here.fingerprint();
    let output = host.pf.run(&["restore", "team/agent:x", "here", "--local"]);
    assert_eq!(output.code, 4, "{output:?}");
    assert_eq!(scene.here.fingerprint(), before);
}

#[test]
fn restores_are_listed_with_what_became_of_them() {
    let scene = scene(Model::Hybrid, &[]);
    let there = scene.b.engine("there", Model::Hybrid, &[]);
    let _other = scene.b.engine("other", Model::Hybrid, &["--seed", "99"]);
    let none = scene.b.pf.run(&["restores"]).ok();
    assert!(none.stdout.contains("remembers no restore"), "{none:?}");
    let report = scene.b.restore("team/agent:x", "there");
    let refused = scene.b.try_restore("team/agent:x", "other");
    assert_eq!(refused.code, 4, "{refused:?}");

    let listed = scene.b.pf.json(&["restores"]);
    let records = listed["restores"].as_array().unwrap();
    let [failed, done] = &records[..] else { panic!("two restores in {listed}") };
    assert!(failed["engine"] == "other" && failed["outcome"] == "failed", "{listed}");
    assert_eq!(failed["code"], "fingerprint_mismatch", "{listed}");
    assert!(done["engine"] == "there" && done["outcome"] == "restored", "{listed}");
    for (field, of_report) in [
        ("digest", "digest"),
        ("sequence", "sequence"),
        ("position", "boundary"),
        ("pages_filled", "pages"),
        ("written_bytes", "written_bytes"),
    ] {
        assert_eq!(done[field], report[of_report], "{field} of {listed}, {report}");
    }
    let one = scene.b.pf.json(&["restores", "--limit", "1"]);
    assert_eq!(one["restores"].as_array().unwrap()[..], records[..1], "the last one");

    let table = scene.b.pf.run(&["restores", "there"]).ok().stdout;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("WHEN") && lines[1].contains("  restored  "), "{table}");
    assert_eq!(scene.b.pf.run(&["restores", "nobody"]).code, 5);
    // An engine is remembered when it has gone.
    drop(there);
    let gone = scene.b.pf.run(&["restores", "there"]).ok();
    assert!(gone.stdout.contains("  restored  "), "{gone:?}");
    let all = wait_for("the engine to leave", 60, || {
        let all = scene.b.pf.json(&["restores"]);
        (all["restores"][1]["gone"] == true).then_some(all)
    });
    assert!(all["restores"][0]["engine"] == "other" && all["restores"][0].get("gone").is_none(), "{all}");
    let table = scene.b.pf.run(&["restores"]).ok().stdout;
    assert!(table.contains("there (gone)") && !table.contains("other (gone)"), "{table}");
}

#[test]
fn what_is_not_there_is_said() {
    let scene = scene(Model::Hybrid, &[]);
    for (reference, engine) in [("team/agent:nope", "here"), ("team/nobody:x", "here"), ("team/agent:x", "nobody")] {
        let output = scene.a.try_restore(reference, engine);
        assert_eq!(output.code, 5, "{reference} {engine}: {output:?}");
    }
    let output = scene.a.pf.run(&["snapshot", "here", "team/agent:y", "--sequence", "seq-99"]);
    assert_eq!(output.code, 5, "{output:?}");
    assert!(output.stderr.contains("seq-1"), "it names those that are there: {output:?}");
}
