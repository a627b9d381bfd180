//! An agent that is recorded, and what is checked of its data after a power cut.

use nix::sys::signal::Signal;
use pfr_crash::check::{REPOSITORY, each, folder, sound};
use pfr_crash::record::{Recorded, Recorder, is_possible};
use pfr_crash::states::{Bound, States};
use pfr_crash::trace::Trace;
use pfr_schema::Digest;
use pfr_store::{GcOptions, Options, Store};
use pfr_tests::{Pf, binary, seed, skip, wait_for};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The agent's data folder below the root: most of its parents are not there at first.
const DATA: &str = "share/pf/agent";

/// A recorded agent, and the command that talks to it.
pub struct Host {
    pub pf: Pf,
    recorder: Recorder,
    agent: Recorded,
    _home: tempfile::TempDir,
}

impl Host {
    /// An agent that answers, with this registry. `None` where this process may not trace others.
    pub fn start(registry: &str) -> Option<Self> {
        if !is_possible() {
            skip("ptrace", "this process may not trace its children");
            return None;
        }
        let (home, pf) = (folder(), Pf::new(registry));
        let log = File::create(pf.path("agent.log")).unwrap();
        let mut command = Command::new(binary("pf-agent"));
        command
            .args(["serve", "--registry", registry, "--data"])
            .arg(home.path().join(DATA))
            .args([Path::new("--socket"), &pf.path("agent.sock")])
            .args([Path::new("--engine-socket"), &Self::engines(&pf)])
            .env_clear()
            .env("HOME", pf.path("."))
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let recorder = Recorder::new(home.path());
        let agent = recorder.start(command).unwrap();
        wait_for("the agent to answer", 60, || (pf.run(&["engines"]).code == 0).then_some(()));
        Some(Self { pf, recorder, agent, _home: home })
    }

    /// The socket of its engines.
    pub fn engines(pf: &Pf) -> PathBuf {
        pf.path("engines.sock")
    }

    /// Kills it. Returns what it did, and how many operations that were until now.
    pub fn kill(self) -> (Trace, usize) {
        let told = self.recorder.position();
        self.agent.signal(Signal::SIGKILL);
        self.agent.wait().unwrap();
        (self.recorder.finish().unwrap(), told)
    }
}

/// Checks the agent's data in each state that a power cut may leave, with the number of the
/// operations before it.
pub fn no_power_cut_harms(trace: &Trace, bound: Bound, check: impl Fn(&Path, usize) -> Result<(), String> + Sync) {
    let states = States::of(trace, bound, seed(), |_| true);
    let wrong = each(&states, |_| true, 4, |dir, at| check(&dir.join(DATA), at));
    println!("{} operations, {} states, {} opened", trace.ops.len(), states.enumerated, states.states.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// The bytes of all records in a folder of the agent's data.
pub fn records(dir: &Path) -> Vec<Vec<u8>> {
    let is_record = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    pfr_tests::files(dir).into_iter().filter(|(path, _)| is_record(path)).map(|(_, bytes)| bytes).collect()
}

/// The agent's store, which is sound.
pub async fn opened(data: &Path) -> Result<Store, String> {
    let store = Store::open(&data.join("store"), Options::default()).await.map_err(|e| format!("REFUSED: {e}"))?;
    sound(&store).await?;
    Ok(store)
}

/// Whether a snapshot is there, and is left by an eviction of everything that may go.
pub async fn is_kept(store: &Store, digest: &Digest) -> Result<(), String> {
    let there = async || store.snapshot(&REPOSITORY.parse().unwrap(), digest).await;
    there().await.map_err(|e| format!("LOST: the snapshot: {e}"))?;
    store.evict(0, &GcOptions::default(), &mut |_| ()).await.map_err(|e| e.to_string())?;
    there().await.map(|_| ()).map_err(|e| format!("LOST: the snapshot is not pinned: {e}"))
}
