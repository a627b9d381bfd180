//! A capture and a restore move only what is new.

use pfr_tests::{Host, Model, Registry};

#[test]
fn a_grown_session_moves_its_new_pages_only() {
    let registry = Registry::start();
    let host = Host::new(&registry.url());
    let mut engine = host.engine("e", Model::Dense, &[]);
    let sequence = engine.open(&Model::Dense.prompt(100));
    let first = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    let page = 2 * 184_320;
    assert_eq!(first["pages"], 7, "{first}");
    assert_eq!(first["resident_bytes"], 7 * page);
    assert_eq!(first["moved_bytes"], 7 * page);

    let again = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    assert_eq!((&again["moved_bytes"], &again["new_bytes"]), (&0.into(), &0.into()), "nothing has changed: {again}");

    engine.generate(&sequence, 20);
    let grown = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    // 100 → 120 tokens: the partial page has changed, and one page is new.
    assert_eq!(grown["pages"], 8, "{grown}");
    assert_eq!(grown["resident_bytes"], 8 * page);
    assert_eq!(grown["moved_bytes"], 2 * page, "{grown}");
    assert_eq!(grown["parent"], again["digest"]);
}

#[test]
fn a_restore_moves_what_the_host_lacks() {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let mut here = a.engine("here", Model::Dense, &[]);
    let sequence = here.open(&Model::Dense.prompt(100));
    a.snapshot("here", "team/agent:one", &["--sequence", &sequence]);
    here.generate(&sequence, 20);
    a.snapshot("here", "team/agent:two", &["--sequence", &sequence]);
    let _there = b.engine("there", Model::Dense, &[]);
    let first = b.restore("team/agent:one", "there");
    let second = b.restore("team/agent:two", "there");
    let page = 2 * 184_320;
    // Encoded, pages have some two thirds of their bytes; documents come besides.
    let pulled = |report: &serde_json::Value| report["pulled_bytes"].as_u64().unwrap();
    let pages = |count: u64| count * page / 2..count * page + 50_000;
    assert!(pages(7).contains(&pulled(&first)), "{first}");
    assert!(pages(2).contains(&pulled(&second)) && pulled(&second) < pulled(&first) / 2, "{second}");
    assert_eq!(second["written_bytes"], 8 * page, "{second}");
}
