//! The checks of a store after a power cut: it opens, has what was acknowledged, serves nothing
//! corrupt, continues to work, and leaks nothing.

use crate::oracle::View;
use crate::states::{State, States};
use pfr_faults::{check, snapshots::Snapshot};
use pfr_schema::RepositoryName;
use pfr_store::{Clock, GcOptions, Options, Store};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The repository that is recorded.
pub const REPOSITORY: &str = "team/agent";
/// The tag of what is pushed after the power cut.
const AFTER: &str = "after-the-power-cut";
/// The registry's data directory, below the root.
pub const DATA: &str = "data";
/// A day, in milliseconds.
const DAY: u64 = 24 * 3_600_000;
/// Collections that a store may need until nothing is left to do.
const COLLECTIONS: usize = 8;

type Result<T = ()> = std::result::Result<T, String>;

/// The folder for states: in memory if there is such a folder, so that the store's own syncs cost
/// nothing.
#[must_use]
pub fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()) } else { tempfile::tempdir() }.unwrap()
}

/// Writes out each state and checks it, until `enough` have failed; returns what is wrong with
/// those, in words.
pub fn each<C>(states: &States<'_>, counts: fn(&Path) -> bool, enough: usize, check: C) -> Vec<String>
where
    C: Fn(&Path, usize) -> Result + Sync,
{
    let (next, failures, stop) = (AtomicUsize::new(0), Mutex::new(Vec::new()), AtomicBool::new(false));
    let try_one = |state: &State| -> Result {
        let dir = folder();
        states.disk(state).write_out(dir.path(), &states.trace().mapped, counts).map_err(|e| e.to_string())?;
        check(dir.path(), states.at(state))
    };
    let work = || {
        while !stop.load(Ordering::Relaxed)
            && let Some(state) = states.states.get(next.fetch_add(1, Ordering::Relaxed))
        {
            if let Err(what) = try_one(state) {
                let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                failures.push(format!("{what}\nafter {}", states.words(state)));
                stop.fetch_or(failures.len() >= enough, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    failures.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a check to its end in a runtime of its own.
///
/// # Errors
/// Those of the check.
pub fn run(check: impl Future<Output = Result>) -> Result {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?.block_on(check)
}

/// Opens the store that lies in `root`, as a registry does when it starts, and goes on with it.
///
/// # Errors
/// In words: what is refused, lost, corrupt, wrong or left over.
pub async fn goes_on(root: &Path, allowed: &[View]) -> Result {
    let (store, time) = open(root).await?;
    store.names_are_known().await.map_err(|e| format!("REFUSED: {e}"))?;
    store.flush_journal().await.map_err(|e| format!("REFUSED: {e}"))?;
    let found = visible(&store).await?;
    expect(&found, allowed)?;
    sound(&store).await?;
    push(&store).await?;
    sound(&store).await?;
    let pushed = visible(&store).await?;
    collect(&store, &time, root).await?;
    if visible(&store).await? != pushed {
        return Err("LOST: a collection changed names".into());
    }
    sound(&store).await?;
    let repository = repository();
    for row in store.snapshots(&repository, None, 1000).await.map_err(|e| e.to_string())?.rows {
        store.delete_snapshot(&repository, &row.digest).await.map_err(|e| format!("deleting {}: {e}", row.digest))?;
    }
    collect(&store, &time, root).await?;
    let left: Vec<PathBuf> = packs(root).into_iter().filter(|path| !belongs(path)).collect();
    if left.is_empty() { Ok(()) } else { Err(format!("LEAKED: {left:?}")) }
}

/// Builds the database anew from the packs and the journal that lie in `root`.
///
/// # Errors
/// In words: what is refused, lost or corrupt.
pub async fn is_rebuilt(root: &Path, allowed: &[View]) -> Result {
    let (store, _) = open(root).await?;
    store.rebuild(&mut |_| ()).await.map_err(|e| format!("REFUSED to rebuild: {e}"))?;
    expect(&visible(&store).await?, allowed).map_err(|what| format!("{what}, after the database was rebuilt"))?;
    sound(&store).await.map_err(|what| format!("{what}, after the database was rebuilt"))
}

async fn open(root: &Path) -> Result<(Store, Arc<AtomicU64>)> {
    let time = Arc::new(AtomicU64::new(Clock::system().now()));
    let now = Arc::clone(&time);
    // Leases end as soon as the clock moves, and hold while it does not.
    let options = Options { lease: Duration::from_millis(1), clock: Clock::new(move || now.load(Ordering::Relaxed)), ..Options::default() };
    let store = Store::open(&root.join(DATA), options).await.map_err(|e| format!("REFUSED: {e}"))?;
    Ok((store, time))
}

fn repository() -> RepositoryName {
    REPOSITORY.parse().unwrap()
}

/// The tags and snapshots that a client can see.
async fn visible(store: &Store) -> Result<View> {
    let mut view = View::default();
    for (name, found) in check::names(store).await.map_err(|e| e.to_string())? {
        if name != repository() {
            return Err(format!("WRONG: there is a repository {name}"));
        }
        view.snapshots.extend(found.snapshots.keys().map(ToString::to_string));
        view.tags.extend(found.tags.iter().map(|(tag, digest)| (tag.to_string(), digest.to_string())));
    }
    Ok(view)
}

fn expect(found: &View, allowed: &[View]) -> Result {
    if allowed.contains(found) { Ok(()) } else { Err(format!("LOST: found {found:#?}\nallowed were {allowed:#?}")) }
}

/// Every byte of every snapshot is read and hashed, and the tables agree with it and with each
/// other.
///
/// # Errors
/// In words: what is corrupt or wrong.
pub async fn sound(store: &Store) -> Result {
    let names = check::names(store).await.map_err(|e| e.to_string())?;
    check::verified(store, &names).await?;
    let report = store.fsck(false, &mut |_| ()).await.map_err(|e| e.to_string())?;
    if report.wrong == 0 { Ok(()) } else { Err(format!("WRONG: {:#?}", report.discrepancies)) }
}

/// A push like any other.
async fn push(store: &Store) -> Result {
    let snapshot = Snapshot::new(&[(9000..9004).collect()], Vec::new());
    let pushed = async {
        let session = store.open_push(&repository()).await?;
        let missing = store.missing(&session.id, snapshot.order.clone()).await?;
        let wanted: Vec<_> = missing.iter().map(|at| snapshot.order[*at].0).collect();
        let mut frames = snapshot.frames(|digest| wanted.contains(digest));
        frames.push(pfr_schema::frame::end_mark(frames.len() as u64).into());
        let frames = futures::stream::iter(frames.into_iter().map(Ok::<_, std::convert::Infallible>));
        store.ingest(&session.id, frames).await?;
        store.commit(&session.id, snapshot.digest, AFTER.parse().ok(), None).await
    };
    pushed.await.map(|_| ()).map_err(|e| format!("a push after the power cut: {e}"))
}

/// Ends all leases and grace periods, and collects until nothing changes.
async fn collect(store: &Store, time: &AtomicU64, root: &Path) -> Result {
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let mut before = None;
    for _ in 0..COLLECTIONS {
        time.fetch_add(2 * DAY, Ordering::Relaxed);
        store.gc(&options, &mut |_| ()).await.map_err(|e| format!("a collection after the power cut: {e}"))?;
        let now = packs(root);
        if before.as_ref() == Some(&now) {
            return Ok(());
        }
        before = Some(now);
    }
    Err(format!("collections go on and on: {before:?}"))
}

/// Files of packs and journal.
fn packs(root: &Path) -> Vec<PathBuf> {
    pfr_tests::files(&root.join(DATA).join("packs")).into_iter().map(|(path, _)| path).collect()
}

/// Whether a file is never deleted: the marker, and objects of the journal.
fn belongs(path: &Path) -> bool {
    let unfinished = path.to_string_lossy().contains('#');
    path == Path::new("pf-store") || (path.starts_with("journal") && !unfinished)
}
