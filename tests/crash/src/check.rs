//! The checks of a registry's stores after a power cut: they open, have what was acknowledged,
//! serve nothing corrupt, continue to work, and leak nothing.

use crate::oracle::View;
use crate::states::{State, States};
use pfr_faults::{check, snapshots::Snapshot};
use pfr_schema::api::DomainState;
use pfr_schema::{DomainName, RepositoryName};
use pfr_store::{Budget, Clock, DomainHome, DomainPacks, DomainTables, Domains, GcOptions, Keys, Options, Store};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The repository that is recorded.
pub const REPOSITORY: &str = "team/agent";
/// The tag of what is pushed after the power cut.
const AFTER: &str = "after-the-power-cut";
/// The domain that is recorded.
pub const DOMAIN: &str = "acme";
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
/// those, in words. States that follow each other in time are checked long after each other: a bug
/// that shows only later in the recording is found soon.
pub fn each<C>(states: &States<'_>, counts: fn(&Path) -> bool, enough: usize, check: C) -> Vec<String>
where
    C: Fn(&Path, usize) -> Result + Sync,
{
    let (next, failures, stop) = (AtomicUsize::new(0), Mutex::new(Vec::new()), AtomicBool::new(false));
    let mut order: Vec<usize> = (0..states.states.len()).collect();
    order.sort_by_key(|at| at.reverse_bits());
    let try_one = |state: &State| -> Result {
        let dir = folder();
        states.disk(state).write_out(dir.path(), &states.trace().mapped, counts).map_err(|e| e.to_string())?;
        check(dir.path(), states.at(state))
    };
    let work = || {
        while !stop.load(Ordering::Relaxed)
            && let Some(at) = order.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let state = &states.states[*at];
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

/// Opens the stores that lie in `root`, as a registry with these keys does when it starts, and goes
/// on with them.
///
/// # Errors
/// In words: what is refused, lost, corrupt, wrong or left over.
pub async fn goes_on(root: &Path, keys: Keys, allowed: &[View]) -> Result {
    let (domains, time) = open(root, keys).await?;
    let store = domains.default_store();
    store.names_are_known().await.map_err(|e| format!("REFUSED: {e}"))?;
    store.flush_journal().await.map_err(|e| format!("REFUSED: {e}"))?;
    let mut stores = Vec::new();
    for name in domain_names(&domains, |state| state == DomainState::Live).await? {
        stores.push((domains.open(&name).await.map_err(|e| format!("REFUSED: domain {name}: {e}"))?, name));
    }
    expect(&all_visible(&stores).await?, allowed)?;
    for (store, name) in &stores {
        store_goes_on(store, &time, &home(root, name)).await.map_err(|what| format!("{what}, in domain {name}"))?;
    }
    drop(stores);
    domains_go_on(&domains, &time, root).await
}

async fn store_goes_on(store: &Store, time: &AtomicU64, home: &Path) -> Result {
    sound(store).await?;
    push(store, 9000, AFTER).await.map_err(|e| format!("a push after the power cut: {e}"))?;
    sound(store).await?;
    let pushed = visible(store).await?;
    collect(store, time, home).await?;
    if visible(store).await? != pushed {
        return Err("LOST: a collection changed names".into());
    }
    sound(store).await?;
    let repository = repository();
    for row in store.snapshots(&repository, None, 1000).await.map_err(|e| e.to_string())?.rows {
        store.delete_snapshot(&repository, &row.digest).await.map_err(|e| format!("deleting {}: {e}", row.digest))?;
    }
    collect(store, time, home).await?;
    let left: Vec<PathBuf> = packs(home).into_iter().filter(|path| !belongs(path)).collect();
    if left.is_empty() { Ok(()) } else { Err(format!("LEAKED: {left:?}")) }
}

/// Makes, fills and deletes domains, those that were being deleted too.
async fn domains_go_on(domains: &Domains, time: &AtomicU64, root: &Path) -> Result {
    let words = |what: &'static str| move |e: pfr_store::Error| format!("{what} a domain after the power cut: {e}");
    for name in domain_names(domains, |_| true).await?.iter().filter(|name| !name.is_default()) {
        domains.delete(name, false).await.map_err(words("deleting"))?;
    }
    let removed = async || {
        for _ in 0..COLLECTIONS {
            time.fetch_add(2 * DAY, Ordering::Relaxed);
            domains.remove_deleted(&Budget::default()).await.map_err(words("removing"))?;
            if domain_names(domains, |_| true).await?.iter().all(DomainName::is_default) {
                let left: Vec<PathBuf> = std::fs::read_dir(root.join(DATA).join(DomainName::FOLDER))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|entry| entry.path())
                    .collect();
                return if left.is_empty() { Ok(()) } else { Err(format!("LEAKED: {left:?}")) };
            }
        }
        Err("LEAKED: a deleted domain does not go".to_owned())
    };
    removed().await?;
    let name: DomainName = DOMAIN.parse().unwrap();
    domains.create(&name).await.map_err(words("making"))?;
    let store = domains.open(&name).await.map_err(words("opening"))?;
    if visible(&store).await? != View::default() {
        return Err("WRONG: a new domain is not empty".into());
    }
    push(&store, 9000, AFTER).await.map_err(|e| format!("a push to a new domain: {e}"))?;
    sound(&store).await?;
    drop(store);
    domains.delete(&name, false).await.map_err(words("deleting"))?;
    removed().await
}

/// Builds the databases anew from the packs and the journals that lie in `root`.
///
/// # Errors
/// In words: what is refused, lost or corrupt.
pub async fn is_rebuilt(root: &Path, keys: Keys, allowed: &[View]) -> Result {
    let (domains, _) = open(root, keys).await?;
    let mut stores = vec![(domains.default_store().clone(), DomainName::default())];
    for name in domains.find().await.map_err(|e| format!("REFUSED to find domains: {e}"))? {
        stores.push((domains.adopt(&name).await.map_err(|e| format!("REFUSED to adopt {name}: {e}"))?, name));
    }
    for (store, name) in &stores {
        store.rebuild(&mut |_| ()).await.map_err(|e| format!("REFUSED to rebuild {name}: {e}"))?;
    }
    expect(&all_visible(&stores).await?, allowed).map_err(|what| format!("{what}, after the databases were rebuilt"))?;
    for (store, name) in &stores {
        sound(store).await.map_err(|what| format!("{what}, in domain {name}, after the databases were rebuilt"))?;
    }
    Ok(())
}

async fn open(root: &Path, keys: Keys) -> Result<(Domains, Arc<AtomicU64>)> {
    let time = Arc::new(AtomicU64::new(Clock::system().now()));
    let now = Arc::clone(&time);
    // Leases end as soon as the clock moves, and hold while it does not.
    let options = Options { lease: Duration::from_millis(1), clock: Clock::new(move || now.load(Ordering::Relaxed)), ..Options::default() };
    let data = root.join(DATA);
    let store = Store::open(&data, options).await.map_err(|e| format!("REFUSED: {e}"))?;
    let home = DomainHome { tables: DomainTables::Files(data.clone()), packs: DomainPacks::Files { root: data, inside: "packs" } };
    Ok((Domains::with_keys(store, Some(home), keys), time))
}

async fn domain_names(domains: &Domains, wanted: impl Fn(DomainState) -> bool) -> Result<Vec<DomainName>> {
    let page = domains.list(None, 1000).await.map_err(|e| format!("REFUSED to list domains: {e}"))?;
    Ok(page.rows.into_iter().filter(|row| wanted(row.state)).map(|row| row.name).collect())
}

/// The folder of a domain.
fn home(root: &Path, name: &DomainName) -> PathBuf {
    let data = root.join(DATA);
    if name.is_default() { data } else { data.join(DomainName::FOLDER).join(name.as_str()) }
}

/// The repository that is recorded.
#[must_use]
pub fn repository() -> RepositoryName {
    REPOSITORY.parse().unwrap()
}

/// What clients can see in all domains.
async fn all_visible(stores: &[(Store, DomainName)]) -> Result<View> {
    let mut all = View::default();
    for (store, name) in stores {
        let view = visible(store).await?;
        if name.is_default() {
            all = View { domains: all.domains, ..view };
        } else {
            all.domains.insert(name.to_string(), view);
        }
    }
    Ok(all)
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

/// Pushes four pages, and returns the digest.
///
/// # Errors
/// In words: those of the store.
pub async fn push(store: &Store, first: u64, tag: &str) -> Result<String> {
    let snapshot = Snapshot::new(&[(first..first + 4).collect()], Vec::new());
    let pushed = async {
        let session = store.open_push(&repository()).await?;
        let missing = store.missing(&session.id, snapshot.order.clone()).await?;
        let wanted: Vec<_> = missing.iter().map(|at| snapshot.order[*at].0).collect();
        let mut frames = snapshot.frames(|digest| wanted.contains(digest));
        frames.push(pfr_schema::frame::end_mark(frames.len() as u64).into());
        let frames = futures::stream::iter(frames.into_iter().map(Ok::<_, std::convert::Infallible>));
        store.ingest(&session.id, frames).await?;
        store.commit(&session.id, snapshot.digest, tag.parse().ok(), None).await
    };
    pushed.await.map(|_| snapshot.digest.to_string()).map_err(|e: pfr_store::Error| e.to_string())
}

/// Ends all leases and grace periods, and collects until nothing changes.
async fn collect(store: &Store, time: &AtomicU64, home: &Path) -> Result {
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let mut before = None;
    for _ in 0..COLLECTIONS {
        time.fetch_add(2 * DAY, Ordering::Relaxed);
        store.gc(&options, &mut |_| ()).await.map_err(|e| format!("a collection after the power cut: {e}"))?;
        let now = packs(home);
        if before.as_ref() == Some(&now) {
            return Ok(());
        }
        before = Some(now);
    }
    Err(format!("collections go on and on: {before:?}"))
}

/// Files of packs and journal.
fn packs(home: &Path) -> Vec<PathBuf> {
    pfr_tests::files(&home.join("packs")).into_iter().map(|(path, _)| path).collect()
}

/// Whether a file is never deleted: the marker, the wrapped key, and objects of the journal.
fn belongs(path: &Path) -> bool {
    let unfinished = path.to_string_lossy().contains('#');
    ["pf-store", "pf-key"].iter().any(|name| path == Path::new(name)) || (path.starts_with("journal") && !unfinished)
}
