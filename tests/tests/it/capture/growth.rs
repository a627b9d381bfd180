//! A capture and a restore move only what is new.

use pfr_tests::{Host, Model, Registry};

#[test]
fn a_grown_session_moves_its_new_pages_only() {
    let registry = Registry::start();
    let host = Host::new(&registry.url());
    let mut engine = host.engine("e", Model::Dense, &[]);
    let sequence = engine.open(&Model::Dense.prompt(52));
    let first = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    let page = 2 * 184_320;
    assert_eq!(first["pages"], 4, "{first}");
    assert_eq!(first["resident_bytes"], 4 * page);
    assert_eq!(first["moved_bytes"], 4 * page);

    let again = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    assert_eq!((&again["moved_bytes"], &again["new_bytes"]), (&0.into(), &0.into()), "nothing has changed: {again}");

    engine.generate(&sequence, 20);
    let grown = host.snapshot("e", "team/agent:main", &["--sequence", &sequence]);
    // 52 → 72 tokens: the partial page has changed, and one page is new.
    assert_eq!(grown["pages"], 5, "{grown}");
    assert_eq!(grown["resident_bytes"], 5 * page);
    assert_eq!(grown["moved_bytes"], 2 * page, "{grown}");
    assert_eq!(grown["parent"], again["digest"]);
}

#[test]
fn a_restore_moves_what_the_host_lacks() {
    let registry = Registry::start();
    // Encoded pages have a length that their numbers decide.
    let (a, b) = (Host::with(&registry.url(), &["--compression", "off"]), Host::new(&registry.url()));
    let mut here = a.engine("here", Model::Dense, &[]);
    let sequence = here.open(&Model::Dense.prompt(52));
    a.snapshot("here", "team/agent:one", &["--sequence", &sequence]);
    here.generate(&sequence, 20);
    a.snapshot("here", "team/agent:two", &["--sequence", &sequence]);
    let _there = b.engine("there", Model::Dense, &[]);
    let first = b.restore("team/agent:one", "there");
    let second = b.restore("team/agent:two", "there");
    let (page, page_tokens) = (2 * 184_320, 16);
    let number = |report: &serde_json::Value, name: &str| report[name].as_u64().unwrap();
    // Of a page that is partly filled its tokens come: zeros are left out. Documents come besides.
    let of_tokens = |count: u64| count * page / page_tokens..count * page / page_tokens + 50_000;
    let (before, after) = (number(&first, "boundary"), number(&second, "boundary"));
    assert!(of_tokens(before).contains(&number(&first, "pulled_bytes")), "{first}");
    let kept = before / page_tokens * page_tokens;
    assert!(of_tokens(after - kept).contains(&number(&second, "pulled_bytes")), "{second}");
    assert_eq!(second["written_bytes"], 5 * page, "{second}");
}

#[test]
fn a_restore_without_the_store_moves_everything_each_time() {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let mut here = a.engine("here", Model::Hybrid, &[]);
    let sequence = here.open(&Model::Hybrid.prompt(100));
    a.snapshot("here", "team/agent:one", &["--sequence", &sequence]);
    let mut there = b.engine("there", Model::Hybrid, &["--dirty", "1"]);
    let restore = || b.pf.json(&["restore", "team/agent:one", "there", "--no-store"]);
    let (first, second) = (restore(), restore());
    assert_eq!((&first["in_store"], &second["in_store"]), (&"not".into(), &"not".into()), "{first}");
    assert!(first["pulled_bytes"].as_u64() > Some(0));
    assert_eq!(first["pulled_bytes"], second["pulled_bytes"]);
    let continued = here.generate(&sequence, 9);
    for report in [first, second] {
        assert_eq!(there.generate(report["sequence"].as_str().unwrap(), 9), continued);
    }
    let output = b.pf.run(&["restore", "team/agent:one", "there", "--local"]);
    assert_eq!(output.code, 5, "the store has it: {output:?}");
}
