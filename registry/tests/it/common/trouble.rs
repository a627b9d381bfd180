//! Packs on a disk that fails as it is told.

use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, Result};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use pfr_testkit::storage::{Call, Hooks, Moment, hooked, watched};
use std::sync::{Arc, Mutex};
use tokio::sync::{Semaphore, watch};

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

/// Holds back what is read of one object.
#[derive(Debug)]
pub struct Hold {
    object: watch::Sender<Option<Path>>,
    /// A permit for each read that was held back.
    pub held: Semaphore,
}

impl Hold {
    /// From now on reads of this object wait; none: nothing waits any more.
    pub fn set(&self, object: Option<Path>) {
        self.object.send_replace(object);
    }
}

#[async_trait]
impl Hooks for Hold {
    async fn before(&self, call: &Call) -> Result<Option<Error>> {
        let is_held = |object: &Option<Path>| call.moment == Moment::Get && object.as_ref() == Some(&call.location);
        let mut object = self.object.subscribe();
        if is_held(&object.borrow_and_update()) {
            self.held.add_permits(1);
            // An error means that there is no sender, and it is here.
            let _ = object.wait_for(|object| !is_held(object)).await;
        }
        Ok(None)
    }
}

/// A store in memory of which a test holds back one object.
pub async fn holding(options: Options) -> (Store, Arc<Hold>) {
    let ([store, _], hold) = holding_twice(options).await;
    (store, hold)
}

/// Two stores over the same packs, each with tables of its own: the second one's can be rebuilt.
pub async fn holding_twice(options: Options) -> ([Store; 2], Arc<Hold>) {
    let hold = Arc::new(Hold { object: watch::Sender::new(None), held: Semaphore::new(0) });
    let packs = hooked(Arc::new(InMemory::new()), hold.clone());
    let metadata = async || SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata in memory");
    let first = Store::new(Arc::clone(&packs), metadata().await, options.clone());
    ([first, Store::new(packs, metadata().await, options)], hold)
}
