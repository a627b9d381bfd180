//! Packs on a disk that fails as it is told.

use object_store::memory::InMemory;
use object_store::{Error, Result};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use pfr_testkit::storage::watched;
use std::sync::{Arc, Mutex};

/// What the disk does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    Unreachable,
    Full,
    Panic,
    /// It does not answer.
    Hang,
}

/// A switch for [`Trouble`].
#[derive(Clone, Debug)]
pub struct Switch(Arc<Mutex<Trouble>>);

impl Switch {
    pub fn set(&self, trouble: Trouble) {
        *self.0.lock().expect("the switch") = trouble;
    }

    async fn wait(&self) {
        if *self.0.lock().expect("the switch") == Trouble::Hang {
            std::future::pending::<()>().await;
        }
    }

    fn strike(&self) -> Result<()> {
        let trouble = *self.0.lock().expect("the switch");
        match trouble {
            Trouble::None | Trouble::Hang => Ok(()),
            Trouble::Unreachable => Err(Error::Generic { store: "test", source: "/secret/path: connection reset".into() }),
            Trouble::Full => Err(Error::Generic { store: "test", source: std::io::Error::from(std::io::ErrorKind::StorageFull).into() }),
            Trouble::Panic => panic!("a panic that a test asked for"),
        }
    }
}

/// A store in memory whose packs fail as the switch says.
pub async fn store() -> (Store, Switch) {
    let switch = Switch(Arc::new(Mutex::new(Trouble::None)));
    let said = switch.clone();
    let say = move |_| {
        let said = said.clone();
        Box::pin(async move {
            said.wait().await;
            said.strike()
        }) as _
    };
    let packs = watched(Arc::new(InMemory::new()), Arc::new(say));
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata in memory");
    (Store::new(packs, metadata, Options::default()), switch)
}
