//! What a mirror copies, in which direction, and at what cost.

use super::{mirror, names, populate, push};
use pfr_tests::{Pf, Registry};

#[test]
fn a_lost_registry_is_rebuilt_from_its_mirror_in_each_direction() {
    let dir = tempfile::TempDir::new().unwrap();
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    populate(&pf);
    let before = names(&a);
    assert_eq!(before.len(), 7);
    // Between two registries: no data directory of the mirror's own.
    let first = mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    assert_eq!((first.number("snapshots_copied"), first.number("repositories")), (7, 3));
    assert_eq!(names(&b), before);
    let again = mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    assert_eq!((again.number("snapshots_present"), again.number("tags_moved"), again.number("bytes")), (7, 0, 0));
    // A is lost; pull into a store of its name, and serve that.
    drop(a);
    let store = dir.path().join("pulled");
    mirror(&["--from", &b.url(), "--data", store.to_str().unwrap()]).ok();
    let pulled = Registry::over(&store, &[]);
    assert_eq!(names(&pulled), before);
    Pf::new(&pulled.url()).run(&["verify", "team/a:c3"]).ok();
    drop((b, pulled));
    // And push from a store that no registry serves.
    let c = Registry::start();
    mirror(&["--to", &c.url(), "--data", store.to_str().unwrap()]).ok();
    assert_eq!(names(&c), before);
    for reference in ["team/a:root", "team/a:c3", "team/b:x", "other:y"] {
        Pf::new(&c.url()).run(&["verify", reference]).ok();
    }
}

#[test]
fn a_second_run_moves_what_changed_and_nothing_is_deleted_unasked() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    let base: Vec<u64> = (0..200).collect();
    push(&pf, "a:t", &base, &[]);
    let run = |options: &[&str]| mirror(&[&["--from", &a.url(), "--to", &b.url()], options].concat()).ok();
    let first = run(&[]).number("bytes");
    assert!(first > 200 * 2 * (16 << 10));
    let changed: Vec<u64> = base.iter().copied().chain([1000]).collect();
    push(&pf, "a:t", &changed, &["--parent", "a:t"]);
    push(&pf, "b:gone", &[7], &[]);
    push(&pf, "b:stays", &[8], &[]);
    let second = run(&[]);
    assert_eq!((second.number("snapshots_copied"), second.number("tags_moved")), (3, 3));
    assert!(second.number("bytes") < first / 10, "{} of {first}", second.number("bytes"));
    pf.run(&["rm", "b:gone"]).ok();
    let unasked = run(&[]);
    assert_eq!((unasked.number("tags_deleted"), unasked.number("snapshots_deleted")), (0, 0));
    assert!(Pf::new(&b.url()).tags("b").contains_key("gone"));
    let asked = run(&["--delete", "--repository", "b"]);
    assert_eq!(asked.number("repositories"), 1);
    assert_eq!(Pf::new(&b.url()).tags("b"), pf.tags("b"));
    assert_eq!(Pf::new(&b.url()).tags("a"), pf.tags("a"));
}

#[test]
fn a_tag_that_went_its_own_way_is_left_alone_and_named() {
    let (a, b) = (Registry::start(), Registry::start());
    let (here, there) = (Pf::new(&a.url()), Pf::new(&b.url()));
    push(&here, "a:t", &[1], &[]);
    push(&here, "a:u", &[2], &[]);
    let own = push(&there, "a:t", &[3], &[]);
    let output = mirror(&["--from", &a.url(), "--to", &b.url()]);
    assert_eq!(output.code, 3, "{output:?}");
    assert!(output.stderr.contains("a:t"), "{output:?}");
    assert_eq!(output.json()["conflicts"][0]["target"], own);
    assert_eq!(there.tags("a")["t"], own);
    assert_eq!(there.tags("a")["u"], here.tags("a")["u"]);
    mirror(&["--from", &a.url(), "--to", &b.url(), "--delete"]).ok();
    assert_eq!(there.tags("a"), here.tags("a"));
}

#[test]
fn a_tag_that_is_immutable_at_the_target_stays_where_it_is() {
    let (a, b) = (Registry::start(), Registry::start());
    let (here, there) = (Pf::new(&a.url()), Pf::new(&b.url()));
    let first = push(&here, "a:v1", &[1], &[]);
    mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    let policies = there.path("policies.json");
    std::fs::write(&policies, r#"{"policies": [{"name": "releases", "repositories": "*", "immutable_tags": ["v*"]}]}"#).unwrap();
    there.run(&["retention", "set", policies.to_str().unwrap()]).ok();
    push(&here, "a:v1", &[1, 2], &["--parent", "a:v1"]);
    let output = mirror(&["--from", &a.url(), "--to", &b.url()]);
    assert_eq!((output.code, output.json()["conflicts"][0]["tag"].as_str()), (3, Some("v1")), "{output:?}");
    here.run(&["rm", "a:v1"]).ok();
    mirror(&["--from", &a.url(), "--to", &b.url(), "--delete"]).ok();
    assert_eq!(there.tags("a")["v1"], first);
}

#[test]
fn signatures_travel_with_their_snapshot_and_after_it_before_the_tags_that_need_them() {
    let (a, b, dir) = (Registry::start(), Registry::start(), tempfile::TempDir::new().unwrap());
    let (here, there) = (Pf::new(&a.url()), Pf::new(&b.url()));
    let key = here.path("release.key");
    let (key, public) = (key.to_str().unwrap().to_owned(), format!("{}.pub", key.display()));
    here.run(&["keygen", &key]).ok();
    let policies = there.path("signing.json");
    let policy = serde_json::json!({"name": "v", "repositories": "*", "tags": ["v*"], "keys": [std::fs::read_to_string(&public).unwrap()]});
    std::fs::write(&policies, serde_json::json!({"policies": [policy]}).to_string()).unwrap();
    there.run(&["signing", "set", policies.to_str().unwrap()]).ok();
    push(&here, "a:v1", &[1], &[]);
    push(&here, "a:v2", &[2], &["--sign-key", &key]);
    // What is not signed comes without the tag that needs it, and is named.
    let first = mirror(&["--from", &a.url(), "--to", &b.url()]);
    assert!(first.code != 0 && first.stdout.contains("signature_required"), "{first:?}");
    assert_eq!(there.tags("a").keys().collect::<Vec<_>>(), ["v2"]);
    there.run(&["verify", "a:v2", "--key", &public]).ok();
    // Signed later: only the signature moves, and then the tag.
    here.run(&["sign", "a:v1", "--key", &key]).ok();
    let second = mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    assert_eq!((second.number("signatures_copied"), second.number("snapshots_copied"), second.number("tags_moved")), (1, 0, 1));
    assert_eq!(there.tags("a"), here.tags("a"));
    let third = mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    assert_eq!(third.number("signatures_copied"), 0);
    // Into a store, and out of it.
    let store = dir.path().join("pulled");
    mirror(&["--from", &b.url(), "--data", store.to_str().unwrap()]).ok();
    let c = Registry::start();
    mirror(&["--to", &c.url(), "--data", store.to_str().unwrap()]).ok();
    Pf::new(&c.url()).run(&["verify", "a:v1", "--key", &public]).ok();
    // What is deleted here goes there, and the rest stays signed.
    here.run(&["rm", "a:v1"]).ok();
    mirror(&["--from", &a.url(), "--to", &b.url(), "--delete"]).ok();
    assert!(!there.tags("a").contains_key("v1"));
    there.run(&["verify", "a:v2", "--key", &public]).ok();
}
