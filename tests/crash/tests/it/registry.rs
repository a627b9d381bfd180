//! The life of a registry, recorded: pushes, commits, deletions, a collection with compaction, WAL
//! checkpoints, a kill, restarts.

use nix::sys::signal::Signal;
use pfr_crash::check::{DATA, REPOSITORY, folder};
use pfr_crash::oracle::{Change, History};
use pfr_crash::record::{Recorded, Recorder, is_possible};
use pfr_crash::trace::Trace;
use pfr_tests::{Pf, Shape, SnapshotDir, binary, own_address, skip, wait_for};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How long leases last: deleted snapshots are collected after that.
const LEASE: Duration = Duration::from_secs(1);
/// More bytes than any disk has. With this floor the log of the metadata is truncated after every
/// transaction, and nothing new is stored.
const FULL: &str = "1152921504606846976";

/// What was recorded, and what the clients were told.
pub struct Life {
    pub trace: Trace,
    pub history: History,
}

/// None where this process may not trace others.
pub fn recorded() -> Option<Life> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let mut registry = Registry::new();
    registry.start(&[]);
    let first = registry.push("first", &[0, 1, 2, 3, 4, 5, 6, 7]);
    let fork = registry.push("fork", &[0, 1, 2, 13, 14]);
    registry.change(&["tag", &format!("{REPOSITORY}@{fork}"), "head"], Change::Tag("head".into(), fork.clone()));
    registry.change(&["tag", &format!("{REPOSITORY}@{first}"), "head"], Change::Tag("head".into(), first.clone()));
    registry.change(&["rm", &format!("{REPOSITORY}:first")], Change::Untag("first".into()));
    registry.change(&["rm", &format!("{REPOSITORY}@{first}")], Change::Remove(first));
    std::thread::sleep(LEASE);
    let collected = registry.collect();
    assert!(collected["packs_compacted"].as_u64() > Some(0) && collected["packs_deleted"].as_u64() > Some(0), "{collected}");
    // The last connection removes the log of the metadata.
    registry.stop(Signal::SIGTERM);

    registry.start(&[]);
    let last = registry.push("last", &[20, 21]);
    registry.stop(Signal::SIGKILL);

    registry.start(&["--min-free-bytes", FULL]);
    registry.change(&["rm", &format!("{REPOSITORY}@{last}")], Change::Remove(last));
    std::thread::sleep(LEASE);
    let collected = registry.collect();
    assert!(collected["packs_deleted"].as_u64() > Some(0), "{collected}");
    registry.stop(Signal::SIGKILL);

    registry.start(&[]);
    registry.push("again", &[0, 1, 30]);
    registry.stop(Signal::SIGTERM);
    Some(registry.end())
}

/// A registry that finds its folders made by a process that was killed before it synced them, or by
/// another one that is about to.
pub fn recorded_in_folders_of_others() -> Option<Life> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let mut registry = Registry::new();
    let packs = Path::new(DATA).join("packs");
    registry.make_folders([DATA.into()]);
    registry.start(&[]);
    registry.stop(Signal::SIGKILL);
    registry.make_folders((0..=255).map(|number| packs.join(format!("{number:02x}"))).chain([packs.join("journal")]));
    registry.start(&[]);
    registry.push("first", &[0, 1, 2]);
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// A registry that is recorded, and its client.
struct Registry {
    home: TempDir,
    recorder: Recorder,
    running: Option<Recorded>,
    pf: Pf,
    starts: usize,
    history: History,
}

impl Registry {
    fn new() -> Self {
        let home = folder();
        std::fs::create_dir(home.path().join("root")).unwrap();
        let recorder = Recorder::new(&home.path().join("root"));
        Self { home, recorder, running: None, pf: Pf::new(""), starts: 0, history: History::default() }
    }

    /// Makes folders that are not there, and syncs none of them.
    fn make_folders(&self, folders: impl IntoIterator<Item = PathBuf>) {
        let root = self.home.path().join("root");
        let mut command = Command::new("mkdir");
        command.arg("-p").args(folders.into_iter().map(|folder| root.join(folder)));
        self.recorder.start(command).unwrap().wait().unwrap();
    }

    fn start(&mut self, options: &[&str]) {
        self.starts += 1;
        let place = |name: &str| self.home.path().join(format!("{name}-{}", self.starts));
        let (out, log) = (place("out"), place("log"));
        let mut command = Command::new(binary("pf-registry"));
        command
            .args(["serve", "--listen", &format!("{}:0", own_address())])
            .args(["--lease-seconds", &LEASE.as_secs().to_string(), "--gc-interval-seconds", "0", "--gc-grace-seconds", "0"])
            .arg("--data")
            .arg(self.home.path().join("root").join(DATA))
            .args(options)
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&log).unwrap());
        self.running = Some(self.recorder.start(command).unwrap());
        let address = wait_for("the registry to listen", 60, || {
            let text = std::fs::read_to_string(&out).unwrap();
            text.lines().find_map(|line| line.strip_prefix("listening on ")).filter(|_| text.ends_with('\n')).map(str::to_owned)
        });
        self.pf.talk_to(&address);
    }

    fn stop(&mut self, signal: Signal) {
        let running = self.running.take().unwrap();
        running.signal(signal);
        running.wait().unwrap();
    }

    /// Notes what a command changes.
    fn change(&mut self, arguments: &[&str], change: Change) {
        let begun = self.recorder.position();
        self.pf.run(arguments).ok();
        self.history.note(begun, self.recorder.position(), change);
    }

    /// Pushes pages under a tag; the digest.
    fn push(&mut self, tag: &str, numbers: &[u64]) -> String {
        let dir = SnapshotDir::write(&self.pf.path(tag), Shape::TINY, numbers);
        let begun = self.recorder.position();
        let digest = self.pf.run(&["push", dir.arg(), &format!("{REPOSITORY}:{tag}")]).ok().last_line().to_owned();
        self.history.note(begun, self.recorder.position(), Change::Commit(digest.clone(), tag.to_owned()));
        digest
    }

    fn collect(&mut self) -> serde_json::Value {
        self.pf.json(&["gc"])
    }

    fn end(self) -> Life {
        Life { trace: self.recorder.finish().unwrap(), history: self.history }
    }
}
