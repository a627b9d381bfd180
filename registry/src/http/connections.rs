//! The state of each connection, so that the least needed one can be closed when another one
//! arrives; and the places of connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How often a waiting connection looks for another one to close.
const RETRY: Duration = Duration::from_millis(50);
/// Connections in the reserve. Each has up to 128 KiB of what its client sent, like any other.
const RESERVE: usize = 64;
/// Connections that wait for a place with a request.
const WAITING: usize = 64;

/// What a connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Activity {
    /// No request is in flight.
    Idle = 0,
    /// A request waits for its client to send or to receive bytes.
    Waiting = 1,
    /// The registry works for it.
    Working = 2,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    begun: Instant,
    state: AtomicUsize,
    /// The client does not receive written bytes.
    blocked: AtomicBool,
    /// Start of the current state, in milliseconds since `begun`.
    since: AtomicU64,
    /// Requests that hyper has read.
    requests: AtomicU64,
    close: Notify,
}

impl Connection {
    fn new(begun: Instant) -> Self {
        let since = AtomicU64::new(millis(begun));
        Self {
            begun,
            state: AtomicUsize::new(Activity::Idle as usize),
            blocked: AtomicBool::new(false),
            since,
            requests: AtomicU64::new(0),
            close: Notify::new(),
        }
    }

    /// Sets what the connection does.
    pub(crate) fn set(&self, state: Activity) {
        if self.state.swap(state as usize, Ordering::Relaxed) != state as usize {
            self.since.store(millis(self.begun), Ordering::Relaxed);
        }
    }

    /// Sets whether the client receives written bytes.
    pub(crate) fn set_receiving(&self, receives: bool) {
        if self.blocked.swap(!receives, Ordering::Relaxed) == receives {
            self.since.store(millis(self.begun), Ordering::Relaxed);
        }
    }

    /// Notes that a request was read.
    pub(crate) fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.set(Activity::Working);
    }

    /// Number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Completes when the connection is to be closed.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }

    fn state(&self) -> usize {
        match self.blocked.load(Ordering::Relaxed) {
            true => Activity::Waiting as usize,
            false => self.state.load(Ordering::Relaxed),
        }
    }
}

fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// All connections.
#[derive(Debug)]
pub(crate) struct Connections {
    begun: Instant,
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Whether those in the reserve. The idle ones among them have not sent their request yet.
    is_reserve: bool,
}

impl Default for Connections {
    fn default() -> Self {
        Self { begun: Instant::now(), next: AtomicU64::new(0), open: Mutex::default(), is_reserve: false }
    }
}

impl Connections {
    fn in_reserve() -> Arc<Self> {
        Arc::new(Self { is_reserve: true, ..Self::default() })
    }

    /// Adds a new connection. It is removed when the returned value is dropped.
    pub(crate) fn open(self: &Arc<Self>) -> OpenConnection {
        self.add(Arc::new(Connection::new(self.begun)))
    }

    fn add(self: &Arc<Self>, connection: Arc<Connection>) -> OpenConnection {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::clone(&connection));
        OpenConnection { id, connection, connections: Arc::clone(self) }
    }

    /// Closes the connection that has been idle for longest. If none is idle, closes the one whose
    /// client has been waited for longest. Never closes a connection that the registry works for.
    /// In the reserve, those that are waited for go first: their request is refused and the rest of
    /// its body is read, and an idle one may be a probe that has just come. Connections need no
    /// minimum age to be closed: only so many a second would get a place then, and a probe would
    /// wait behind all that came before it.
    pub(crate) fn make_room(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = |connection: &Connection| {
            let is_idle = connection.state() == Activity::Idle as usize;
            (is_idle == self.is_reserve, connection.since.load(Ordering::Relaxed))
        };
        let least = open
            .iter()
            .filter(|(_, connection)| connection.state() != Activity::Working as usize)
            .min_by_key(|(_, connection)| rank(connection));
        if let Some(id) = least.map(|(id, _)| *id)
            && let Some(connection) = open.remove(&id)
        {
            connection.close.notify_one();
        }
    }
}

/// An open connection.
pub(crate) struct OpenConnection {
    id: u64,
    pub(crate) connection: Arc<Connection>,
    connections: Arc<Connections>,
}

impl OpenConnection {
    /// Moves it to other connections, where it is the newest.
    pub(crate) fn move_to(&mut self, others: &Arc<Connections>) {
        self.connection.since.store(millis(self.connection.begun), Ordering::Relaxed);
        *self = others.add(Arc::clone(&self.connection));
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Connections, and how many there may be.
pub(crate) struct ConnectionSlots {
    permits: Arc<Semaphore>,
    /// Those that are open.
    pub(crate) connections: Arc<Connections>,
    /// How long a new connection waits.
    limit: Duration,
}

impl ConnectionSlots {
    pub(crate) fn new(most: usize, limit: Duration) -> Self {
        Self { permits: Arc::new(Semaphore::new(most)), connections: Arc::default(), limit }
    }

    /// Admits a new connection. If there are too many, the connection that is needed least is
    /// closed.
    pub(crate) async fn enter(&self) -> Option<OwnedSemaphorePermit> {
        if let Some(permit) = self.enter_at_once() {
            return Some(permit);
        }
        let entering = Arc::clone(&self.permits).acquire_owned();
        let closing = async {
            loop {
                self.connections.make_room();
                tokio::time::sleep(RETRY).await;
            }
        };
        tokio::select! {
            biased;
            permit = entering => permit.ok(),
            never = closing => never,
            () = tokio::time::sleep(self.limit) => None,
        }
    }

    fn enter_at_once(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }
}

/// The places of connections that may send requests.
///
/// While all are taken, a new connection gets one in a small reserve until its request is known.
/// Probes are answered there, so that a registry that works for as many connections as it may is
/// not taken for one that hangs. Any other request leaves the reserve to the next connection, and
/// waits for a place.
pub(crate) struct Places {
    slots: ConnectionSlots,
    reserve: ConnectionSlots,
    waiting: Arc<Semaphore>,
}

impl Places {
    /// `most` places, for each of which a connection waits at most for `limit`.
    pub(crate) fn new(most: usize, limit: Duration) -> Self {
        let slots = ConnectionSlots::new(most, limit);
        let reserve = ConnectionSlots { connections: Connections::in_reserve(), ..ConnectionSlots::new(RESERVE, limit) };
        Self { slots, reserve, waiting: Arc::new(Semaphore::new(WAITING)) }
    }

    /// Finds a place for a new connection, which `open` adds to the connections that it is given.
    /// None if there is none in the reserve either.
    pub(crate) async fn enter(&self, open: impl FnOnce(&Arc<Connections>) -> OpenConnection) -> Option<Place> {
        if let Some(permit) = self.slots.enter_at_once() {
            return Some(Place { open: open(&self.slots.connections), permit, is_reserve: false });
        }
        let Some(permit) = self.reserve.enter().await else {
            tracing::warn!("connection refused: too many connections, and none of them is idle");
            return None;
        };
        Some(Place { open: open(&self.reserve.connections), permit, is_reserve: true })
    }

    /// Finds a place for the request of a connection. Returns false if there is none: the
    /// connection must end when the request is refused.
    pub(crate) async fn admit(&self, place: &mut Place) -> bool {
        if !place.is_reserve {
            return true;
        }
        let Ok(waiting) = Arc::clone(&self.waiting).try_acquire_owned() else { return false };
        place.permit = waiting;
        let Some(permit) = self.slots.enter().await else { return false };
        place.permit = permit;
        place.is_reserve = false;
        place.open.move_to(&self.slots.connections);
        true
    }
}

/// The place of a connection, free when this is dropped.
pub(crate) struct Place {
    open: OpenConnection,
    permit: OwnedSemaphorePermit,
    is_reserve: bool,
}

impl Place {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.open.connection
    }

    /// Whether the connection has no place of its own: it is in the reserve, or left the reserve
    /// and found no place.
    pub(crate) fn is_reserve(&self) -> bool {
        self.is_reserve
    }
}

/// Marks a request for which there was no place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoPlace;

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[test]
    fn the_longest_idle_goes_first_then_the_slowest_and_never_one_at_work() {
        let connections = Arc::new(Connections::default());
        let set = |state, since| {
            let opened = connections.open();
            opened.connection.set(state);
            opened.connection.since.store(since, Ordering::Relaxed);
            opened
        };
        let open = [
            set(Activity::Working, 1),
            set(Activity::Waiting, 2),
            set(Activity::Idle, 9),
            set(Activity::Idle, 4),
            set(Activity::Waiting, 7),
        ];
        let mut closed = Vec::new();
        for _ in 0..6 {
            connections.make_room();
            closed.extend((0..open.len()).filter(|i| open[*i].connection.closed().now_or_never().is_some()));
        }
        assert_eq!(closed, [3, 2, 1, 4]);
    }

    #[tokio::test]
    async fn a_connection_that_moved_makes_room_only_where_it_is_now() {
        let (from, to) = (Arc::new(Connections::default()), Arc::new(Connections::default()));
        let mut moved = from.open();
        moved.move_to(&to);
        from.make_room();
        assert!(moved.connection.closed().now_or_never().is_none());
        to.make_room();
        assert!(moved.connection.closed().now_or_never().is_some());
    }

    #[test]
    fn in_the_reserve_a_probe_that_has_just_come_outlives_what_is_waited_for() {
        let reserve = Connections::in_reserve();
        let (drained, probe) = (reserve.open(), reserve.open());
        drained.connection.set(Activity::Waiting);
        reserve.make_room();
        assert_eq!(reserve.open.lock().unwrap().keys().copied().collect::<Vec<u64>>(), [probe.id]);
        reserve.make_room();
        assert!(reserve.open.lock().unwrap().is_empty(), "then idle ones go by age");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_leaves_the_reserve_and_waits_for_a_place() {
        let limit = Duration::from_secs(30);
        let places = Places::new(1, limit);
        let first = places.enter(Connections::open).await.unwrap();
        first.connection().set(Activity::Working);
        let mut late = places.enter(Connections::open).await.unwrap();
        assert!(!first.is_reserve() && late.is_reserve());
        let begun = tokio::time::Instant::now();
        assert!(!places.admit(&mut late).await && begun.elapsed() >= limit);
        // Many more than there are places in the reserve or to wait.
        let (mut waiting, mut refused) = (vec![late], 0);
        for _ in 0..RESERVE + WAITING {
            let mut place = places.enter(Connections::open).await.unwrap();
            let admitted = places.admit(&mut place).now_or_never();
            match admitted {
                None => waiting.push(place),
                Some(admitted) => refused += usize::from(!admitted),
            }
        }
        assert_eq!((waiting.len(), refused), (WAITING, RESERVE + 1));
        let mut next = places.enter(Connections::open).await.unwrap();
        drop(waiting);
        let leave = async {
            tokio::time::sleep(limit / 2).await;
            drop(first);
        };
        assert!(tokio::join!(places.admit(&mut next), leave).0 && !next.is_reserve());
    }
}
