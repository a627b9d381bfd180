//! Sources with wrong answers: these must not end a mirror, fill it, or make it delete.

use super::{mirror, push};
use pfr_tests::{Fate, Pf, Registry, Seen, front};
use serde_json::{Value, json};

/// Changes a JSON answer.
fn change(edit: impl FnOnce(&mut Value) + Send + 'static) -> Fate {
    Fate::change(move |bytes| {
        let mut value = serde_json::from_slice(&bytes).unwrap();
        edit(&mut value);
        serde_json::to_vec(&value).unwrap()
    })
}

#[test]
fn lists_that_lead_in_circles_have_an_end() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    push(&pf, "endless:t", &[1], &[]);
    push(&pf, "own:t", &[2], &[]);
    push(&pf, "well:t", &[3], &[]);
    let one = json!({"digest": pf.tags("endless")["t"], "tags": ["t"], "parents": [], "pushed_at": 1, "logical_bytes": 1, "new_bytes": 1});
    let page = json!({"snapshots": [one], "next": "again"}).to_string().into_bytes();
    let liar = front(&a.url(), move |seen| match seen.path.as_str() {
        path if path.starts_with("/v1/repositories/endless/snapshots?") => Fate::Instead(200, "application/json", page.clone()),
        path if path.starts_with("/v1/repositories/own/snapshots?") => change(|list| {
            let own = list["snapshots"][0]["digest"].clone();
            list["snapshots"][0]["parents"] = json!([own, own]);
        }),
        _ => Fate::Pass,
    });
    let output = mirror(&["--from", &liar.url, "--to", &b.url()]);
    assert_eq!(output.json()["failures"].as_array().unwrap().len(), 1, "{output:?}");
    assert_eq!(output.json()["failures"][0]["repository"], "endless", "{output:?}");
    assert!(output.stderr.contains("does not end"), "{output:?}");
    let there = Pf::new(&b.url());
    assert_eq!((there.tags("well"), there.tags("own")), (pf.tags("well"), pf.tags("own")));
    assert!(output.peak_memory < 96 << 20, "{} MiB", output.peak_memory >> 20);
}

#[test]
fn one_snapshot_that_an_end_fails_on_does_not_keep_the_others_away() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    let bug = push(&pf, "a:bug", &[1], &[]);
    let proxy = push(&pf, "b:proxy", &[2], &[]);
    push(&pf, "c:well", &[3], &[]);
    let problem = json!({
        "type": "urn:pf:problem:internal", "title": "A bug", "status": 500, "detail": "a bug", "code": "internal", "retryable": false
    });
    let problem = problem.to_string().into_bytes();
    let (first, second) = (bug.clone(), proxy.clone());
    // Asked for by name, or as frames.
    let about =
        |seen: &Seen, digest: &str| seen.path.replace("%3A", ":").contains(digest) || String::from_utf8_lossy(&seen.body).contains(digest);
    let liar = front(&a.url(), move |seen| match seen {
        seen if about(seen, &first) => Fate::Instead(500, "application/problem+json", problem.clone()),
        seen if about(seen, &second) => Fate::Instead(500, "text/html", b"<html>".to_vec()),
        _ => Fate::Pass,
    });
    let output = mirror(&["--from", &liar.url, "--to", &b.url()]);
    let failed: Vec<Value> = output.json()["failures"].as_array().unwrap().iter().map(|f| f["snapshot"].clone()).collect();
    assert_eq!(failed, [json!(bug), json!(proxy)], "{output:?}");
    assert_ne!(output.code, 0);
    assert_eq!(Pf::new(&b.url()).tags("c"), pf.tags("c"));
}

#[test]
fn what_a_tag_of_the_target_points_at_is_not_deleted() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    let last = push(&pf, "a:main", &[1], &[]);
    let old = push(&pf, "a:old", &[2], &[]);
    mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    pf.run(&["rm", "a:old"]).ok();
    // The tag moved, and its new snapshot is deleted before the list of snapshots is read.
    let liar = front(&a.url(), move |seen| match seen.path.as_str() {
        path if path.starts_with("/v1/repositories/a/tags?") => {
            change(|list| list["tags"][0]["digest"] = json!(format!("sha256:{:064}", 0)))
        }
        path if path.starts_with("/v1/repositories/a/snapshots?") => change(|list| list["snapshots"] = json!([])),
        _ => Fate::Pass,
    });
    let output = mirror(&["--from", &liar.url, "--to", &b.url(), "--delete"]).ok();
    let there = Pf::new(&b.url());
    assert_eq!(there.tags("a")["main"], last);
    assert_eq!((output.number("tags_deleted"), output.number("snapshots_deleted")), (1, 1), "{output:?}");
    assert_eq!(there.run(&["inspect", &format!("a@{old}")]).code, 5);
}

#[test]
fn a_collection_that_failed_in_the_registry_fails_the_command() {
    let a = Registry::start();
    let failed = |report: &mut Value| {
        report["finished_at"] = json!(1);
        report["error"] = json!("no room to move");
    };
    let liar = front(&a.url(), move |seen| if seen.path.starts_with("/v1/gc") { change(failed) } else { Fate::Pass });
    let output = Pf::new(&liar.url).run(&["gc", "--remote", "--json"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert_eq!(output.json()["error"], "no room to move");
    assert!(output.stderr.contains("no room to move"), "{output:?}");
    Pf::new(&a.url()).run(&["gc", "--remote"]).ok();
}
