//! A pull into a directory that a power cut ends: the directory is complete, or the next pull
//! completes it.

use nix::sys::wait::WaitStatus;
use pfr_client::{Destination, Progress, Remote, RemoteOptions, pull};
use pfr_crash::check::{REPOSITORY, each, folder, run};
use pfr_crash::record::{Recorder, is_possible};
use pfr_crash::states::{Bound, States};
use pfr_crash::trace::{Action, ROOT, Synced, Trace};
use pfr_schema::Selector;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, files, seed, skip};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const TAG: &str = "a";
/// The directory that is pulled into, below the root.
const OUT: &str = "out";
/// The file that marks a directory as complete. A pull writes it last.
const MANIFEST: &str = "page_manifest.json";

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A recorded pull, and the files that it wrote.
struct Pulled {
    registry: Registry,
    trace: Trace,
    whole: Files,
}

/// Records a pull. `None` if this process may not trace others.
fn recorded() -> Option<Pulled> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let registry = Registry::start();
    let host = Pf::new(&registry.url());
    let reference = format!("{REPOSITORY}:{TAG}");
    let dir = SnapshotDir::write(&host.path("dir"), Shape::TINY, &[0, 1, 2]);
    std::fs::create_dir(dir.path.join("attachments")).unwrap();
    std::fs::write(dir.path.join("attachments/notes.txt"), "what the agent was at").unwrap();
    host.run(&["push", dir.arg(), &reference]).ok();
    let home = folder();
    let out = home.path().join(OUT);
    let recorder = Recorder::new(home.path());
    let program = recorder.start(host.command(&["pull", &reference, out.to_str().unwrap(), "--retries", "0"])).unwrap();
    assert!(matches!(program.wait().unwrap(), WaitStatus::Exited(_, 0)));
    Some(Pulled { registry, trace: recorder.finish().unwrap(), whole: files(&out).into_iter().collect() })
}

impl Pulled {
    /// Checks the states that a power cut may leave of `trace`. Returns texts about the wrong ones,
    /// and stops after `enough` of them.
    fn wrong(&self, trace: &Trace, bound: Bound, enough: usize) -> Vec<String> {
        let states = States::of(trace, bound, seed(), |_| true);
        let wrong = each(&states, |_| true, enough, |dir, at| self.check(&dir.join(OUT), at == trace.ops.len()));
        println!("{} operations, {} states, {} opened, {} wrong", trace.ops.len(), states.enumerated, states.states.len(), wrong.len());
        wrong
    }

    fn check(&self, out: &Path, told: bool) -> Result<(), String> {
        let found: Files = files(out).into_iter().collect();
        if told && !found.contains_key(Path::new(MANIFEST)) {
            return Err("LOST: the pull had ended, and nothing says that the directory is complete".into());
        }
        if found.contains_key(Path::new(MANIFEST))
            && let Some((path, _)) = self.whole.iter().find(|(path, bytes)| found.get(*path) != Some(bytes))
        {
            return Err(format!("CORRUPT: the directory says that it is complete, and {} is not", path.display()));
        }
        run(self.pull(out))?;
        let again: Files = files(out).into_iter().collect();
        if again == self.whole { Ok(()) } else { Err(format!("the next pull left {:?}", again.keys())) }
    }

    async fn pull(&self, out: &Path) -> Result<(), String> {
        let remote =
            Remote::new(&self.registry.url(), RemoteOptions { retries: 0, ..RemoteOptions::default() }).map_err(|e| e.to_string())?;
        let (repository, tag) = (REPOSITORY.parse().unwrap(), Selector::Tag { tag: TAG.parse().unwrap(), back: 0 });
        let destination = Destination::Directory { path: out.to_owned(), store: None };
        let pulled = pull(&remote, &repository, &tag, &destination, &Progress::default()).await;
        pulled.map(|_| ()).map_err(|e| format!("REFUSED: the next pull: {e}"))
    }
}

fn no_power_cut_harms(bound: Bound) {
    let Some(pulled) = recorded() else { return };
    let wrong = pulled.wrong(&pulled.trace, bound, 4);
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn a_directory_that_a_power_cut_left_is_complete_or_completed_by_the_next_pull() {
    no_power_cut_harms(Bound::NORMAL);
}

#[test]
fn a_blob_takes_two_operations_and_no_rename() {
    let Some(pulled) = recorded() else { return };
    for place in pulled.whole.keys().filter(|place| place.starts_with("blobs")) {
        let path = Path::new(OUT).join(place);
        let of_it = pulled.trace.ops.iter().enumerate().filter(|(_, op)| op.path == path);
        let words: Vec<String> = of_it.map(|(at, _)| pulled.trace.words(at)).collect();
        assert_eq!(words.len(), 2, "its name and its bytes: {words:?}");
    }
    let renamed = pulled.trace.ops.iter().filter(|op| matches!(op.action, Action::Rename { .. }));
    let renamed: Vec<&Path> = renamed.map(|op| op.path.as_path()).collect();
    assert!(renamed.contains(&Path::new(OUT).join(MANIFEST).as_path()), "{renamed:?}");
    assert!(renamed.iter().all(|path| !path.starts_with(Path::new(OUT).join("blobs"))), "{renamed:?}");
}

mod long {
    use super::{Bound, all_syncs_but_one_are_needed, no_power_cut_harms};

    #[test]
    fn a_directory_that_a_power_cut_left_is_complete_or_completed_by_the_next_pull() {
        no_power_cut_harms(Bound::LONG);
    }

    #[test]
    fn every_sync_of_a_pull_but_one_is_needed() {
        all_syncs_but_one_are_needed(Bound::COARSE);
    }
}

#[test]
fn every_sync_of_a_pull_but_one_is_needed() {
    all_syncs_but_one_are_needed(Bound::NORMAL);
}

/// Opens so many states without the sync that is not needed.
fn all_syncs_but_one_are_needed(bound: Bound) {
    let Some(pulled) = recorded() else { return };
    let syncs: Vec<(usize, PathBuf, Synced)> = pulled.trace.syncs().map(|(at, path, synced)| (at, path.to_owned(), synced)).collect();
    // Creating a folder syncs its parent. Here the sync of everything, before the page manifest,
    // covers that too.
    let unneeded = (PathBuf::new(), Synced::Directory(ROOT));
    let mut needed = 0;
    for (at, path, synced) in &syncs {
        let trace = pulled.trace.without_syncs(|other, _, _| other == *at);
        let is_unneeded = (path, synced) == (&unneeded.0, &unneeded.1);
        // A needed sync is found at the first state that is wrong. For the other one, all states
        // of `bound` are opened.
        let wrong = pulled.wrong(&trace, if is_unneeded { bound } else { Bound::COARSE }, 1);
        println!("without {synced:?} of {path:?}: {wrong:?}");
        assert_eq!(wrong.is_empty(), is_unneeded, "{synced:?} of {path:?} of {syncs:?}");
        needed += usize::from(!wrong.is_empty());
    }
    assert_eq!(needed, 3, "everything, then the page manifest, then its name: {syncs:?}");
}
