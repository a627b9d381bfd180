//! Every refusal: message, exit code, and nothing changed. Through the real `pf` and a real
//! registry.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, files};
use std::os::unix::fs::symlink;

/// Name, what is done to a good directory, exit code, words of the message.
type Case = (&'static str, fn(&SnapshotDir), i32, &'static str);

fn compress(dir: &SnapshotDir, number: u64, bytes: &[u8]) {
    let path = dir.page_file(number);
    drop(std::fs::remove_file(&path));
    std::fs::write(path.with_extension("zst"), bytes).unwrap();
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

const CHECKPOINT: &str = r#"{"abi":"pf.checkpoint.v1","key":{"scheme":"pf-prefix-v1","prefix":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","tokens":64,"alignment":64,"salt":"s","adapter":null},"tensors":[{"name":"a","kind":"recurrent","layer":0,"shape":[4],"logical_dtype":"f32","storage_dtype":"f32","layout":{"tag":"row-major","strides":[1],"offset":0},"payload_hash":"HASH","payload_bytes":16,"value_hash":"pfv1:sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}]}"#;

fn checkpoint(dir: &SnapshotDir, hash: &str) {
    std::fs::write(dir.path.join("checkpoint.json"), CHECKPOINT.replace("HASH", hash)).unwrap();
}

const CASES: &[Case] = &[
    ("a missing blob", |d| std::fs::remove_file(d.page_file(3)).unwrap(), 5, "$.pages[1].v"),
    ("wrong bytes of the right length", |d| std::fs::write(d.page_file(3), [7; 128]).unwrap(), 4, "hashes to"),
    ("a blob too short", |d| std::fs::write(d.page_file(3), [7; 100]).unwrap(), 4, "128 expected"),
    ("a blob too long", |d| std::fs::write(d.page_file(3), [7; 129]).unwrap(), 4, "129 bytes"),
    ("an empty blob", |d| std::fs::write(d.page_file(3), []).unwrap(), 4, "128 expected"),
    (
        "a truncated zstd file",
        |d| {
            let encoded = zstd(&Shape::TINY.page(3));
            compress(d, 3, &encoded[..encoded.len() - 5]);
        },
        4,
        "zst",
    ),
    ("a zstd file of other bytes", |d| compress(d, 3, &zstd(&[1; 128])), 4, "hashes to"),
    ("a zstd file of another length", |d| compress(d, 3, &zstd(&[1; 127])), 4, "zst"),
    ("a zstd file that is none", |d| compress(d, 3, b"not zstd at all"), 4, "zst"),
    ("a zip bomb", |d| compress(d, 3, &zstd(&vec![0; 1 << 28])), 4, "zst"),
    ("a duplicate ix", |d| d.edit(r#""ix":1"#, r#""ix":0"#), 1, "$.pages[1].ix: expected every ix once"),
    ("unsorted pages", |d| d.edit(r#""ix":1"#, r#""ix":9"#), 1, "sorted by ix"),
    ("an unknown dtype", |d| d.edit("bf16", "int4"), 1, "unknown variant `int4`"),
    ("an unknown layout", |d| d.edit("paged-batchinvariant-v1", "paged-v9"), 1, "$.layout"),
    ("a dangling sequence", |d| d.edit("[0,1,2", "[0,1,77"), 1, "$.logical_seqs[0].page_ixs[2]"),
    ("a fill beyond the page", |d| d.edit(r#""fill_in_last_page":1"#, r#""fill_in_last_page":4"#), 1, "less than the page size"),
    ("zero layers", |d| d.edit(r#""n_layers":2"#, r#""n_layers":0"#), 1, "positive"),
    ("an overflowing geometry", |d| d.edit(r#""n_layers":2"#, r#""n_layers":4294967295"#), 1, "too large"),
    ("a geometry of other pages", |d| d.edit(r#""n_layers":2"#, r#""n_layers":3"#), 4, "192 expected"),
    ("trailing bytes", |d| append(d, b" {}"), 1, "trailing"),
    ("another spelling", |d| d.edit(r#"{"layout":"#, r#"{ "layout":"#), 1, "canonical"),
    ("an upper-case digest", upper_case, 1, "lower-case"),
    ("an unknown field", |d| d.edit(r#"{"layout""#, r#"{"extra":1,"layout""#), 1, "extra"),
    ("no JSON", |d| std::fs::write(d.manifest(), "PK").unwrap(), 1, "page_manifest.json"),
    ("an oversized manifest", |d| std::fs::File::create(d.manifest()).unwrap().set_len(65 << 20).unwrap(), 1, "too large"),
    ("no manifest", |d| std::fs::remove_file(d.manifest()).unwrap(), 1, "page_manifest.json"),
    ("a link that leaves the directory", link_out, 1, "link"),
    (
        "a folder for a blob",
        |d| {
            std::fs::remove_file(d.page_file(3)).unwrap();
            std::fs::create_dir(d.page_file(3)).unwrap();
        },
        1,
        "file",
    ),
    ("a bad configuration", |d| std::fs::write(d.path.join("config.json"), r#"{"parents":["x"]}"#).unwrap(), 1, "config.json"),
    ("three parents", |d| std::fs::write(d.path.join("config.json"), three_parents()).unwrap(), 1, "parents"),
    ("a bad checkpoint", |d| std::fs::write(d.path.join("checkpoint.json"), "{}").unwrap(), 1, "checkpoint.json"),
    (
        "a checkpoint without its payload",
        |d| checkpoint(d, &pfr_schema::Digest::sha256(b"0123456789abcdef").to_string()),
        5,
        "$.tensors[0].payload_hash",
    ),
    (
        "a checkpoint payload of another length",
        |d| {
            let hash = d.put(b"too short");
            checkpoint(d, &hash.to_string());
        },
        4,
        "16 expected",
    ),
    (
        "a checkpoint payload of other bytes",
        |d| {
            let hash = d.put(b"0123456789abcdef");
            std::fs::write(d.blob(&hash), b"0123456789abcdeF").unwrap();
            checkpoint(d, &hash.to_string());
        },
        4,
        "hashes to",
    ),
];

fn append(dir: &SnapshotDir, bytes: &[u8]) {
    let mut all = std::fs::read(dir.manifest()).unwrap();
    all.extend_from_slice(bytes);
    std::fs::write(dir.manifest(), all).unwrap();
}

fn upper_case(dir: &SnapshotDir) {
    let text = std::fs::read_to_string(dir.manifest()).unwrap();
    let at = text.find("sha256:").unwrap() + 7;
    let upper = text[at..at + 64].to_uppercase();
    std::fs::write(dir.manifest(), format!("{}{upper}{}", &text[..at], &text[at + 64..])).unwrap();
}

fn link_out(dir: &SnapshotDir) {
    let outside = dir.path.parent().unwrap().join("secret");
    std::fs::write(&outside, [7; 128]).unwrap();
    std::fs::remove_file(dir.page_file(3)).unwrap();
    symlink(outside, dir.page_file(3)).unwrap();
}

fn three_parents() -> String {
    let digest = pfr_schema::Digest::sha256(b"");
    format!(r#"{{"parents":["{digest}","{digest}","{digest}"]}}"#)
}

#[test]
fn bad_directories_are_refused_with_their_message_and_change_nothing() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let good = SnapshotDir::write(&pf.path("good"), Shape::TINY, &[100, 101]);
    pf.run(&["push", good.arg(), "team/agent:good"]).ok();
    pf.run(&["pull", "team/agent:good"]).ok();
    let before = (pf.visible(), pf.run(&["ls", "--local", "--json"]).ok().stdout);
    let mut failed = Vec::new();
    for (i, (name, harm, code, words)) in CASES.iter().enumerate() {
        let dir = SnapshotDir::write(&pf.path(&format!("case-{i}")), Shape::TINY, &(0..6).collect::<Vec<_>>());
        harm(&dir);
        let output = pf.run(&["push", dir.arg(), "team/agent:bad"]);
        if output.code != *code || !output.stderr.contains(words) || !output.stderr.starts_with("error: ") || !output.stdout.is_empty() {
            failed.push(format!("{name}: expected {code} and {words:?}, found {output:?}"));
        }
        let after = (pf.visible(), pf.run(&["ls", "--local", "--json"]).ok().stdout);
        assert_eq!(before, after, "{name} changed something");
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
    assert!(!pf.tags("team/agent").contains_key("bad"));
}

#[test]
fn hostile_names_and_references_are_refused() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("d"), Shape::TINY, &[1, 2]);
    let long = format!("a/{}", "b".repeat(300));
    let hostile = [
        "../x",
        "/abs:t",
        "a//b:t",
        "A/b:t",
        "a/../b:t",
        "a/./b:t",
        "",
        ":t",
        "a:",
        "a:b:c",
        "a:-t",
        "a:../t",
        "a@sha256:short",
        "a@md5:00",
        "a b:t",
        "a:t~x",
        "a\n:t",
        "-a:t",
        "a/:t",
        "a%2fb:t",
        "ünïcode:t",
        &long,
        "http://user:pw@127.0.0.1/a:t",
        "http:///a:t",
        "a:t\u{7f}",
    ];
    for reference in hostile {
        let output = pf.run(&["push", dir.arg(), "--", reference]);
        assert_eq!(output.code, 1, "{reference:?}: {output:?}");
        assert!(!output.stderr.contains("panicked"), "{output:?}");
        let output = pf.run(&["pull", "--", reference]);
        assert_eq!(output.code, 1, "{reference:?}: {output:?}");
    }
    assert_eq!(pf.visible(), serde_json::json!([]));
}

#[test]
fn something_missing_exits_5_a_moved_tag_exits_3_and_a_silent_registry_exits_7() {
    let mut registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("d"), Shape::TINY, &[1, 2]);
    let next = SnapshotDir::write(&pf.path("n"), Shape::TINY, &[1, 3]);
    for command in [
        &["pull", "no/where:x"][..],
        &["inspect", "no/where"],
        &["log", "no/where:x"],
        &["rm", "no/where:x"],
        &["fork", "no/where:x", "-n", "2"],
    ] {
        let output = pf.run(command);
        assert_eq!(output.code, 5, "{command:?}: {output:?}");
    }
    let digest = pf.run(&["push", dir.arg(), "a:t"]).ok().last_line().to_owned();
    for command in [&["pull", "a:other"][..], &["pull", "a:t~1"], &["diff", "a:t", "a:other"], &["tag", "a:nope", "x"]] {
        let output = pf.run(command);
        assert_eq!(output.code, 5, "{command:?}: {output:?}");
    }
    let before = pf.visible();
    let stale = format!("sha256:{}", "0".repeat(64));
    for expected in [stale.as_str(), "absent"] {
        let output = pf.run(&["push", next.arg(), "a:t", "--if-tag-is", expected]);
        assert_eq!(output.code, 3, "{output:?}");
        assert!(output.stderr.contains(&digest), "it says where the tag is: {output:?}");
        assert_eq!(pf.visible(), before);
    }
    pf.run(&["push", next.arg(), "a:t", "--if-tag-is", &digest]).ok();
    registry.kill();
    let output = pf.run(&["ls", "--retries", "1"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert_eq!(pf.run(&["push"]).code, 1);
    assert_eq!(pf.run(&["frobnicate"]).code, 1);
    assert_eq!(pf.run(&["--help"]).code, 0);
}

#[test]
fn a_directory_of_another_snapshot_is_not_overwritten() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let (a, b) = (SnapshotDir::write(&pf.path("a"), Shape::TINY, &[1, 2]), SnapshotDir::write(&pf.path("b"), Shape::TINY, &[3]));
    pf.run(&["push", a.arg(), "x:a"]).ok();
    let before = files(&b.path);
    let output = pf.run(&["pull", "x:a", b.arg()]);
    assert_eq!(output.code, 1, "{output:?}");
    assert_eq!(files(&b.path), before);
    pf.run(&["pull", "x:a", a.arg()]).ok();
}
