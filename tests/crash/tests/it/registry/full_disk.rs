//! Kills on a disk without a free byte, before each operation on files of a deletion and of a
//! collection: the registry starts, has everything that was acknowledged, and frees space.

use super::*;
use pfr_crash::check::goes_on;
use pfr_crash::oracle::View;
use std::io::Write as _;

/// Room for the database, its log and its reserve.
const MEGABYTES: u32 = 16;
const KEPT: [&str; 2] = ["first", "second"];

/// A store with snapshots that stay and one that goes, to be copied.
struct Sample {
    template: TempDir,
    /// Its digests: those of [`KEPT`], then that of the one that goes.
    digests: Vec<String>,
}

impl Sample {
    /// None where this process may not trace others. With `is_deleted`, the one that goes is only
    /// to be collected.
    fn new(is_deleted: bool) -> Option<Self> {
        if !is_possible() {
            skip("ptrace", "this process may not trace its children");
            return None;
        }
        let template = folder();
        let digests = fill(&template.path().join(DATA), async |store| {
            let mut digests = Vec::new();
            for (number, tag) in KEPT.into_iter().chain(["goes"]).enumerate() {
                digests.push(push(store, number as u64 * 3, tag).await?);
            }
            if is_deleted {
                store.delete_snapshot(&repository(), &digests[2].parse().unwrap()).await.map_err(|e| e.to_string())?;
            }
            Ok(digests)
        });
        Some(Self { template, digests })
    }

    /// A copy of it on a disk of its own that has no byte left. None where this process may not
    /// mount one.
    fn on_full_disk(&self) -> Option<Registry> {
        let home = folder();
        let disk = SmallDisk::mount(&home.path().join("root"), MEGABYTES)?;
        let copied = Command::new("cp").args(["-a", "--sparse=never"]).arg(self.template.path().join(DATA)).arg(disk.path()).status();
        assert!(copied.unwrap().success());
        let ballast = File::create(disk.path().join("ballast")).unwrap();
        for piece in [1 << 16, 4096, 1] {
            while (&ballast).write_all(&vec![1; piece]).is_ok() {}
        }
        Some(Registry::on(home, Some(disk)))
    }

    /// What clients see, with or without the snapshot that goes.
    fn view(&self, is_there: bool) -> View {
        let count = KEPT.len() + usize::from(is_there);
        let tags = KEPT.into_iter().chain(["goes"]).zip(&self.digests).map(|(tag, digest)| (tag.to_owned(), digest.clone()));
        View { snapshots: self.digests.iter().take(count).cloned().collect(), tags: tags.take(count).collect(), ..View::default() }
    }

    /// A registry that was killed starts while the disk is full, has all that was acknowledged, and
    /// frees what goes. Then there is space, and it goes on.
    fn survived(&self, mut registry: Registry, is_gone: bool) {
        registry.recorder.kill_at(usize::MAX);
        registry.start(&[]);
        let snapshots = "/v1/repositories/team%2Fagent/snapshots";
        for digest in &self.digests[..KEPT.len()] {
            let verified = ask(&registry.address, "POST", &format!("{snapshots}/{digest}/verify"));
            assert!(verified.starts_with("HTTP/1.1 200"), "{verified}");
        }
        let deleted = ask(&registry.address, "DELETE", &format!("{snapshots}/{}", self.digests[2]));
        assert!(deleted.starts_with("HTTP/1.1 404") || (!is_gone && deleted.starts_with("HTTP/1.1 204")), "{is_gone}: {deleted}");
        registry.collect();
        registry.stop(Signal::SIGKILL);
        let root = registry.home.path().join("root");
        std::fs::remove_file(root.join("ballast")).unwrap();
        run(goes_on(&root, Keys::default(), &[self.view(false)])).unwrap();
    }

    /// Deletes the snapshot, and kills the registry after so many operations. Returns whether it
    /// was killed before it answered; none where this process may not mount a disk.
    fn killed_in_a_deletion(&self, after: usize) -> Option<bool> {
        let mut registry = self.on_full_disk()?;
        registry.start(&[]);
        registry.recorder.kill_at(registry.recorder.position() + after);
        let answer = ask(&registry.address, "DELETE", &format!("/v1/repositories/team%2Fagent/snapshots/{}", self.digests[2]));
        let is_told = answer.starts_with("HTTP/1.1 204");
        assert!(is_told || answer.is_empty(), "after {after} operations: {answer}");
        registry.stop(Signal::SIGKILL);
        self.survived(registry, is_told);
        Some(!is_told)
    }

    /// Collects with the program, and kills it after so many operations. Returns whether it was
    /// killed before its end.
    fn killed_in_a_collection(&self, after: usize) -> Option<bool> {
        let registry = self.on_full_disk()?;
        registry.recorder.kill_at(after);
        let mut command = Command::new(binary("pf-registry"));
        command.args(["gc", "--grace", "0", "--data"]).arg(registry.home.path().join("root").join(DATA));
        command.stdout(Stdio::null()).stderr(File::create(registry.home.path().join("log")).unwrap());
        let status = registry.recorder.start(command).unwrap().wait().unwrap();
        let log = std::fs::read_to_string(registry.home.path().join("log")).unwrap();
        assert!(matches!(status, WaitStatus::Exited(_, 0) | WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{status:?}: {log}");
        self.survived(registry, true);
        Some(matches!(status, WaitStatus::Signaled(..)))
    }
}

/// Kills after every `step`-th operation, until the work ends before it would be killed. Returns
/// the number of kills.
fn sweep(step: usize, killed_after: impl Fn(usize) -> Option<bool>) -> Option<usize> {
    for kills in 0.. {
        if !killed_after(kills * step)? {
            return Some(kills);
        }
    }
    None
}

/// Kills after every `step`-th operation.
fn no_kill_harms(step: usize) {
    if let Some(sample) = Sample::new(false)
        && let Some(kills) = sweep(step, |after| sample.killed_in_a_deletion(after))
    {
        println!("{kills} kills within a deletion");
        assert!(kills * step >= 60, "a deletion has more operations");
    }
    if let Some(sample) = Sample::new(true)
        && let Some(kills) = sweep(step, |after| sample.killed_in_a_collection(after))
    {
        println!("{kills} kills within a collection");
        assert!(kills * step >= 60, "a collection has more operations");
    }
}

#[test]
fn no_kill_within_a_deletion_or_a_collection_on_a_full_disk_loses_anything() {
    no_kill_harms(30);
}

mod long {
    #[test]
    fn no_kill_within_a_deletion_or_a_collection_on_a_full_disk_loses_anything() {
        super::no_kill_harms(1);
    }
}
