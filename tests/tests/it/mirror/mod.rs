//! Replication between registries, through the real binaries.

mod copies;
mod faults;
mod foreign;

use pfr_tests::{Output, Pf, Registry, Shape, SnapshotDir, binary, peak_memory, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A mirror, not yet started.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("pf-registry"));
    command.arg("mirror").args(arguments).arg("--json").env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a mirror to its end.
pub fn mirror(arguments: &[&str]) -> Output {
    end(command(arguments).spawn().unwrap())
}

/// Waits for its end.
pub fn end(mut child: Child) -> Output {
    let mut peak = 0;
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = std::thread::spawn(move || std::io::read_to_string(&mut out).unwrap());
    let errors = std::thread::spawn(move || std::io::read_to_string(&mut err).unwrap());
    let status = wait_for("the mirror to end", 300, || {
        peak = peak.max(peak_memory(child.id()));
        child.try_wait().unwrap()
    });
    Output { code: status.code().unwrap_or(-1), stdout: read.join().unwrap(), stderr: errors.join().unwrap(), peak_memory: peak }
}

/// Pushes pages under a reference; the digest.
pub fn push(pf: &Pf, reference: &str, pages: &[u64], options: &[&str]) -> String {
    let dir = SnapshotDir::write(&pf.path(&reference.replace(['/', ':'], "-")), Shape::SMALL, pages);
    pf.json(&[&["push", dir.arg(), reference], options].concat())["digest"].as_str().unwrap().to_owned()
}

/// Three repositories with lineage, forks and several tags.
pub fn populate(pf: &Pf) {
    let base: Vec<u64> = (0..40).collect();
    push(pf, "team/a:root", &base, &[]);
    for child in 0..4_u64 {
        let pages: Vec<u64> = base.iter().copied().chain([100 + child]).collect();
        let parent = if child == 0 { "team/a:root".to_owned() } else { format!("team/a:c{}", child - 1) };
        push(pf, &format!("team/a:c{child}"), &pages, &["--parent", &parent]);
    }
    pf.run(&["fork", "team/a:c1", "-n", "5"]).ok();
    push(pf, "team/b:x", &(200..210).collect::<Vec<_>>(), &[]);
    push(pf, "other:y", &[300, 301], &[]);
}

/// Tags and snapshots of a registry, without the fields that a mirror cannot preserve.
pub fn names(registry: &Registry) -> Vec<Value> {
    let pf = Pf::new(&registry.url());
    let mut snapshots: Vec<Value> = Vec::new();
    for repository in ["team/a", "team/b", "other"] {
        for mut snapshot in pf.json(&["ls", repository])["snapshots"].as_array().unwrap().clone() {
            snapshot.as_object_mut().unwrap().retain(|field, _| matches!(field.as_str(), "digest" | "tags" | "parents" | "logical_bytes"));
            snapshot["repository"] = repository.into();
            snapshots.push(snapshot);
        }
    }
    snapshots.sort_by_key(ToString::to_string);
    snapshots
}

/// Every file below a directory of packs.
pub fn packs(registry: &Registry) -> BTreeSet<PathBuf> {
    let root = registry.data().join("packs");
    pfr_tests::files(&root).into_iter().map(|(path, _)| root.join(path)).collect()
}

/// Flips a bit in the middle of the packs that came since `before`.
pub fn damage_since(registry: &Registry, before: &BTreeSet<PathBuf>) {
    let new: Vec<PathBuf> = packs(registry).difference(before).cloned().collect();
    assert!(!new.is_empty());
    for path in new {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
}
