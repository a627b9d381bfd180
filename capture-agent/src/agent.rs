//! The agent: one a host. What it owns, and nothing else.

use crate::config::Config;
use crate::engines::Engines;
use crate::error::Result;
use crate::pushes::Pushes;
use pfr_store::Store;
use std::sync::Arc;

/// The agent. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Agent(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    store: Store,
    engines: Engines,
    pushes: Pushes,
}

impl Agent {
    /// Opens the local store and takes up pushes that were not finished.
    ///
    /// # Errors
    /// [`crate::Error::Store`], [`crate::Error::Io`].
    pub async fn open(config: Config) -> Result<Self> {
        let store = Store::open(&config.store_dir(), pfr_store::Options::default()).await?;
        let pushes = Pushes::open(&config, store.clone()).await?;
        Ok(Self(Arc::new(Inner { engines: Engines::new(&config), config, store, pushes })))
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

    /// Engines on this host.
    #[must_use]
    pub fn engines(&self) -> &Engines {
        &self.0.engines
    }

    /// Pushes in the background.
    #[must_use]
    pub fn pushes(&self) -> &Pushes {
        &self.0.pushes
    }
}
