//! Directories that are traps: pipes, links, devices. A push refuses at once and never waits.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, wait_for};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

fn pipe(path: &Path) {
    drop(std::fs::remove_file(path));
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Name, change to a good directory, part of the message.
type Trap = (&'static str, fn(&SnapshotDir), &'static str);

const TRAPS: &[Trap] = &[
    ("a pipe for a page", |d| pipe(&d.page_file(3)), "regular file"),
    (
        "a pipe for a compressed page",
        |d| {
            std::fs::remove_file(d.page_file(3)).unwrap();
            pipe(&d.page_file(3).with_extension("zst"));
        },
        "regular file",
    ),
    ("a pipe for the manifest", |d| pipe(&d.manifest()), "regular file"),
    ("a pipe for the configuration", |d| pipe(&d.path.join("config.json")), "regular file"),
    ("a pipe for the tokens", |d| pipe(&d.path.join("tokens.bin")), "regular file"),
    (
        "a pipe among the attachments",
        |d| {
            std::fs::create_dir(d.path.join("attachments")).unwrap();
            pipe(&d.path.join("attachments/notes"));
        },
        "regular file",
    ),
    ("a folder among the attachments", |d| std::fs::create_dir_all(d.path.join("attachments/notes")).unwrap(), "regular file"),
    (
        "an attachment that is a link out",
        |d| {
            std::fs::create_dir(d.path.join("attachments")).unwrap();
            symlink("/etc/hostname", d.path.join("attachments/notes")).unwrap();
        },
        "link",
    ),
    ("attachments that are a link out", |d| symlink("/etc", d.path.join("attachments")).unwrap(), "link"),
    (
        "a manifest that is a link out",
        |d| {
            let outside = d.path.with_extension("outside");
            std::fs::rename(d.manifest(), &outside).unwrap();
            symlink(outside, d.manifest()).unwrap();
        },
        "link",
    ),
    (
        "blobs that are a link out",
        |d| {
            let outside = d.path.with_extension("blobs");
            std::fs::rename(d.path.join("blobs"), &outside).unwrap();
            symlink(outside, d.path.join("blobs")).unwrap();
        },
        "link",
    ),
    (
        "a link to itself",
        |d| {
            std::fs::remove_file(d.page_file(3)).unwrap();
            symlink(d.page_file(3), d.page_file(3)).unwrap();
        },
        "follow",
    ),
    (
        "a link to a device",
        |d| {
            std::fs::remove_file(d.page_file(3)).unwrap();
            symlink("/dev/zero", d.page_file(3)).unwrap();
        },
        "link",
    ),
];

#[test]
fn pipes_links_and_folders_in_a_source_are_refused_without_waiting() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let mut failed = Vec::new();
    for (i, (name, set, words)) in TRAPS.iter().enumerate() {
        let dir = SnapshotDir::write(&pf.path(&format!("trap-{i}")), Shape::TINY, &(0..6).collect::<Vec<_>>());
        set(&dir);
        let mut child = pf.command(&["push", dir.arg(), "a:trap"]).spawn().unwrap();
        wait_for(&format!("the refusal of {name}"), 20, || child.try_wait().unwrap());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() != Some(1) || !said.starts_with("error: ") || !said.contains(words) {
            failed.push(format!("{name}: expected exit code 1 and {words:?}, found {:?}: {said}", output.status.code()));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
    assert_eq!(pf.visible(), serde_json::json!([]));
}

#[test]
fn links_inside_the_directory_are_followed() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &(0..6).collect::<Vec<_>>());
    std::fs::rename(dir.page_file(3), dir.path.join("elsewhere")).unwrap();
    symlink(dir.path.join("elsewhere"), dir.page_file(3)).unwrap();
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    pf.run(&["verify", "a:t"]).ok();
}

#[test]
fn a_pull_does_not_write_through_links_that_lie_in_its_way() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[1]);
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    let (out, precious) = (pf.path("out"), pf.path("precious"));
    std::fs::write(&precious, "precious").unwrap();
    let blob = out.join(dir.page_file(2).strip_prefix(&dir.path).unwrap());
    std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
    symlink(&precious, &blob).unwrap();
    symlink(&precious, format!("{}.tmp", blob.display())).unwrap();
    drop(pf.run(&["pull", "a:t", out.to_str().unwrap()]));
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
}
