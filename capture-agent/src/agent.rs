//! The agent of a host: the parts that it owns.

use crate::config::Config;
use crate::copies::Room;
use crate::engines::Engines;
use crate::error::{Error, Result};
use crate::jobs::Jobs;
use crate::llama::Llamas;
use crate::priority::Priority;
use crate::pushes::Pushes;
use crate::rate::Rate;
use crate::restore::{Passages, Records, Resumes, Searches, Staged};
use crate::saves::Saves;
use crate::upkeep;
use pfr_client::Flight;
use pfr_schema::agent::EngineInfo;
use pfr_service::Shared;
use pfr_store::{Schedule, Store};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;

/// The agent. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Agent(Shared<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    store: Store,
    room: Room,
    engines: Engines,
    llamas: Llamas,
    pushes: Pushes,
    staged: Staged,
    records: Records,
    resumes: Resumes,
    searches: Searches,
    passages: Passages,
    flight: Flight,
    saves: Saves,
    rate: Rate,
    pull_rate: Rate,
    priority: Priority,
    jobs: Jobs,
    /// Background tasks, until the agent is dropped.
    schedule: Schedule,
    _lock: File,
}

impl Agent {
    /// Opens the local store and continues unfinished pushes. Jobs that were under way are listed
    /// as interrupted, and captures that were under way are given up.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Io`]; [`Error::Invalid`] if another agent has this data folder.
    pub async fn open(config: Config) -> Result<Self> {
        let lock = lock(&config).await?;
        let store = Store::open(&config.store_dir(), pfr_store::Options::default()).await?;
        end_captures(&store).await;
        let pushes = Pushes::open(&config, store.clone()).await?;
        let schedule = upkeep::schedule(&store, config.max_store_size.map(|size| size.0));
        let tasks = schedule.clone();
        pfr_service::task::spawn(async move { tasks.run().await });
        let jobs = Jobs::open(&config, store.clone()).await?;
        let engines = Engines::new(&config);
        let llamas = Llamas::open(&config, engines.ring())?;
        let flight = Flight::new(config.restore_bytes);
        let room = Room::of(store.clone(), config.store_dir());
        Ok(Self(Shared::new(Inner {
            config,
            store,
            room,
            engines,
            llamas,
            pushes,
            staged: Staged::default(),
            records: Records::default(),
            resumes: Resumes::default(),
            searches: Searches::default(),
            passages: Passages::default(),
            flight,
            saves: Saves::default(),
            rate: Rate::default(),
            pull_rate: Rate::default(),
            priority: Priority::default(),
            jobs,
            schedule,
            _lock: lock,
        })))
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The local store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// The room for the local store.
    pub(crate) fn room(&self) -> &Room {
        &self.0.room
    }

    /// Engines on this host.
    #[must_use]
    pub fn engines(&self) -> &Engines {
        &self.0.engines
    }

    /// All engines, servers of llama.cpp too, by name; each with what lies ready for it.
    pub(crate) fn all_engines(&self) -> Vec<EngineInfo> {
        let mut engines = self.engines().list();
        for info in &mut engines {
            (info.staged, info.outcomes) = self.staged().info(&info.engine);
            info.restoring = self.passages().info(&info.engine);
        }
        engines.extend(self.llamas().list());
        engines.sort_by(|a, b| a.engine.cmp(&b.engine));
        engines
    }

    /// Servers of llama.cpp.
    #[must_use]
    pub fn llamas(&self) -> &Llamas {
        &self.0.llamas
    }

    /// Pushes in the background.
    #[must_use]
    pub fn pushes(&self) -> &Pushes {
        &self.0.pushes
    }

    /// Restores that wait for an engine to ask.
    #[must_use]
    pub fn staged(&self) -> &Staged {
        &self.0.staged
    }

    /// The last restores, and what became of them.
    #[must_use]
    pub fn records(&self) -> &Records {
        &self.0.records
    }

    /// Snapshots that requests resume from.
    pub(crate) fn resumes(&self) -> &Resumes {
        &self.0.resumes
    }

    /// Look-ups of automatic mode.
    pub(crate) fn searches(&self) -> &Searches {
        &self.0.searches
    }

    /// Restores whose blobs come from a registry.
    pub(crate) fn passages(&self) -> &Passages {
        &self.0.passages
    }

    /// The budget for bytes in flight between registries and engines.
    #[must_use]
    pub fn flight(&self) -> &Flight {
        &self.0.flight
    }

    /// Saves that requests asked for.
    #[must_use]
    pub fn saves(&self) -> &Saves {
        &self.0.saves
    }

    /// In the background, evicts snapshots until the store fits its size limit, if it has one, and
    /// merges small packs.
    pub(crate) fn tidy(&self) {
        upkeep::wake(&self.0.schedule);
    }

    /// How fast captures were.
    #[must_use]
    pub fn rate(&self) -> &Rate {
        &self.0.rate
    }

    /// How fast pulls were.
    #[must_use]
    pub fn pull_rate(&self) -> &Rate {
        &self.0.pull_rate
    }

    /// Jobs: warms and drains.
    #[must_use]
    pub fn jobs(&self) -> &Jobs {
        &self.0.jobs
    }

    /// Which pulls go first.
    pub(crate) fn priority(&self) -> &Priority {
        &self.0.priority
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.schedule.stop();
    }
}

/// Ends the sessions of captures that an earlier agent began and did not end: their leases would
/// keep what they stored for an hour. No other agent captures into this store, because this one has
/// the lock of the data folder. Sessions of pulls stay: a pull goes on with what it has stored.
async fn end_captures(store: &Store) {
    match store.end_captures().await {
        Ok(0) => {}
        Ok(captures) => tracing::info!(captures, "captures that an earlier agent did not end are given up"),
        // A start must not fail on a full disk.
        Err(error) => tracing::warn!(%error, "sessions of captures of an earlier agent stay open until their leases end"),
    }
}

/// Locks the data folder: two agents would push everything twice and replace each other's sockets.
/// The lock ends with the process. One that was killed is waited for a few seconds.
async fn lock(config: &Config) -> Result<File> {
    pfr_service::durable::create_private_dir_all(&config.data).map_err(Error::io(format!("data folder {}", config.data.display())))?;
    let path = config.data.join("lock");
    let file = File::create(&path).map_err(Error::io(format!("lock {}", path.display())))?;
    let lock = || match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(())),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(Error::io(format!("lock {}", path.display()))(error.into())),
    };
    if pfr_service::lock::wait(&config.data, lock).await?.is_none() {
        return Err(Error::Invalid(format!("another agent has the data folder {}; stop it, or give --data DIR", config.data.display())));
    }
    Ok(file)
}
