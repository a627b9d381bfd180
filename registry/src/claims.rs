//! Claims: which push sends which blob, so that clients that push the same send it once.
//!
//! ```text
//! missing, with `claim` ─▶ stored? ─▶ claimed by another push? ─▶ `coming`: its client asks again before it sends
//!                                                             └▶ otherwise claimed by this one, whose client sends it now
//! ```
//!
//! A claim saves an upload and never decides correctness: it is a note in the memory of this
//! process. Without it a blob is sent twice, and stored once. It ends when its push is committed or
//! aborted, or an upload of its push fails, or when its client does not send for [`STALL`] although
//! it is waited for, and in any case after [`LONGEST`]. A stored blob is not missing, so its claim
//! is not looked at any more, except by a caller that does not see the snapshot: for it the manifest
//! stays missing, and so the commit ends the claim.
//!
//! A caller learns only of claims for a repository that it sees, or pushes to itself: without
//! claims it could not learn that a repository that is hidden from it gets a snapshot.

use crate::auth::Caller;
use crate::metrics::{CLAIMED, COMING, LAPSED};
use futures::Stream;
use parking_lot::Mutex;
use pfr_schema::{Digest, DomainName, Kind, RepositoryName};
use pfr_store::PushId;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Time after which the claims of a push end whose client sends nothing, although the registry
/// waits for it.
const STALL: Duration = Duration::from_secs(3);
/// Time after which a claim ends in any case.
pub(crate) const LONGEST: Duration = Duration::from_secs(30);
/// Time after which a client is told to ask again.
pub(crate) const WAIT: Duration = Duration::from_millis(200);
/// Claims in memory at a time, of all domains: about 20 MiB. Beyond that no more are made.
const MOST: usize = 112 << 10;
/// How often claims that have ended are forgotten.
const SWEEP: Duration = Duration::from_secs(5);

/// The claims of this process.
pub(crate) struct Claims(Mutex<Inner>);

struct Inner {
    /// Claims by domain: what one domain stores says nothing about another. A blob may have several
    /// claims of pushes that may not know of each other.
    domains: HashMap<DomainName, HashMap<(Digest, Kind), Vec<Claim>>>,
    pushes: HashMap<PushId, Arc<Push>>,
    /// Claims in all domains, also those that have ended and are not forgotten yet.
    count: usize,
    swept: Instant,
}

struct Claim {
    push: Arc<Push>,
    generation: u64,
    at: Instant,
}

/// A push that has made claims.
struct Push {
    domain: DomainName,
    repository: RepositoryName,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct State {
    /// Grows when all claims made so far end.
    generation: u64,
    /// Uploads on which the registry works, rather than waits for their client.
    working: u32,
    /// When the client last asked or sent something.
    moved: Instant,
}

impl State {
    /// Whether a claim of the push still holds.
    fn keeps(&self, claim: &Claim, now: Instant) -> bool {
        claim.generation == self.generation
            && now.saturating_duration_since(claim.at) < LONGEST
            && (self.working > 0 || now.saturating_duration_since(self.moved) < STALL)
    }
}

/// The push that asks, and for which caller.
pub(crate) struct Asking<'a> {
    pub(crate) domain: &'a DomainName,
    pub(crate) repository: &'a RepositoryName,
    pub(crate) push: &'a PushId,
    pub(crate) caller: &'a Caller,
}

/// The push of a claim, as the one that asks sees it.
struct Known {
    push: Arc<Push>,
    state: State,
    /// Whether it is the one that asks.
    is_own: bool,
    /// Whether the one that asks waits for it: it is another one, and may be known to it.
    is_waited_for: bool,
}

impl Known {
    fn of(claim: &Claim, own: Option<&Arc<Push>>, asking: &Asking<'_>) -> Self {
        let push = Arc::clone(&claim.push);
        let is_own = own.is_some_and(|own| Arc::ptr_eq(own, &push));
        let is_visible = push.repository == *asking.repository || asking.caller.sees(&push.repository);
        let state = *push.state.lock();
        Self { push, state, is_own, is_waited_for: is_visible && !is_own }
    }
}

impl Claims {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Inner { domains: HashMap::new(), pushes: HashMap::new(), count: 0, swept: Instant::now() }))
    }

    /// Of these blobs, which are missing, the positions of those that other pushes send. Claims the
    /// first `most` of the others for the push that asks.
    pub(crate) fn ask(&self, asking: &Asking<'_>, missing: impl Iterator<Item = (usize, (Digest, Kind))>, most: u64) -> Vec<usize> {
        let now = Instant::now();
        let mut inner = self.0.lock();
        inner.sweep(now);
        let own = inner.push(asking, most > 0, now);
        let Inner { domains, count, .. } = &mut *inner;
        let blobs = domains.entry(asking.domain.clone()).or_default();
        // Claims of one push lie side by side, so the last one that was looked at is remembered.
        let mut known: Option<Known> = None;
        let (mut coming, mut free, mut claimed, mut lapsed) = (Vec::new(), 0_u64, 0_u64, 0_u64);
        for (position, name) in missing {
            let (mut is_coming, mut is_own) = (false, false);
            for claim in blobs.get(&name).into_iter().flatten() {
                if known.as_ref().is_none_or(|known| !Arc::ptr_eq(&known.push, &claim.push)) {
                    known = Some(Known::of(claim, own.as_ref(), asking));
                }
                if let Some(known) = &known
                    && known.state.keeps(claim, now)
                {
                    is_coming |= known.is_waited_for;
                    is_own |= known.is_own;
                }
            }
            if is_coming && !is_own {
                coming.push(position);
                continue;
            }
            free += 1;
            let Some(own) = &own else { continue };
            if is_own || free > most || *count >= MOST {
                continue;
            }
            let claims = blobs.entry(name).or_default();
            let before = claims.len();
            claims.retain(|claim| {
                let holds = claim.push.state.lock().keeps(claim, now);
                lapsed += u64::from(!holds && !Arc::ptr_eq(&claim.push, own));
                holds
            });
            *count = *count + 1 + claims.len() - before;
            claims.reserve_exact(1);
            claims.push(Claim { push: Arc::clone(own), generation: own.state.lock().generation, at: now });
            claimed += 1;
        }
        drop(inner);
        metrics::counter!(CLAIMED).increment(claimed);
        metrics::counter!(COMING).increment(coming.len() as u64);
        metrics::counter!(LAPSED).increment(lapsed);
        coming
    }

    /// Ends the claims of a push to `repository` in `domain`, which is over.
    pub(crate) fn end(&self, domain: &DomainName, repository: &RepositoryName, push: &PushId) {
        let found = self.0.lock().pushes.get(push).cloned();
        if let Some(push) = found.filter(|push| push.domain == *domain && push.repository == *repository) {
            push.release();
        }
    }

    /// An upload of a push.
    pub(crate) fn upload(&self, push: &PushId) -> Upload {
        Upload(self.0.lock().pushes.get(push).cloned())
    }
}

impl Inner {
    /// The push that asks, if it has made claims, or makes some now.
    fn push(&mut self, asking: &Asking<'_>, claims: bool, now: Instant) -> Option<Arc<Push>> {
        let found = self.pushes.get(asking.push).cloned();
        let push = found.or_else(|| {
            claims.then(|| {
                let state = Mutex::new(State { generation: 0, working: 0, moved: now });
                let push = Arc::new(Push { domain: asking.domain.clone(), repository: asking.repository.clone(), state });
                self.pushes.insert(asking.push.clone(), Arc::clone(&push));
                push
            })
        })?;
        push.state.lock().moved = now;
        Some(push)
    }

    /// Forgets what has ended, now and then.
    fn sweep(&mut self, now: Instant) {
        if now.saturating_duration_since(self.swept) < SWEEP {
            return;
        }
        self.swept = now;
        self.domains.retain(|_, blobs| {
            blobs.retain(|_, claims| {
                claims.retain(|claim| claim.push.state.lock().keeps(claim, now));
                !claims.is_empty()
            });
            !blobs.is_empty()
        });
        self.count = self.domains.values().flat_map(HashMap::values).map(Vec::len).sum();
        // Uploads and claims hold theirs.
        self.pushes.retain(|_, push| Arc::strong_count(push) > 1 || now.saturating_duration_since(push.state.lock().moved) < LONGEST);
    }
}

impl Push {
    /// Ends all claims made so far.
    fn release(&self) {
        self.state.lock().generation += 1;
    }
}

/// An upload of a push.
pub(crate) struct Upload(Option<Arc<Push>>);

impl Upload {
    /// The same bytes. The push does not stall while the registry works on them.
    pub(crate) fn watch<S>(&self, stream: S) -> Watched<S> {
        let mut watched = Watched { stream, push: self.0.clone(), is_working: false };
        watched.note(true);
        watched
    }

    /// Ends the claims of its push: nobody knows whether its client tries again.
    pub(crate) fn failed(&self) {
        if let Some(push) = &self.0 {
            push.release();
        }
    }
}

/// The bytes of an upload.
pub(crate) struct Watched<S> {
    stream: S,
    push: Option<Arc<Push>>,
    /// Whether the registry works, rather than waits for the client.
    is_working: bool,
}

impl<S> Watched<S> {
    fn note(&mut self, is_working: bool) {
        let Some(push) = &self.push else { return };
        if !is_working && !self.is_working {
            return;
        }
        let mut state = push.state.lock();
        match (self.is_working, is_working) {
            (false, true) => state.working += 1,
            (true, false) => state.working -= 1,
            _ => {}
        }
        state.moved = Instant::now();
        drop(state);
        self.is_working = is_working;
    }
}

impl<S: Stream + Unpin> Stream for Watched<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let polled = Pin::new(&mut self.stream).poll_next(cx);
        self.note(polled.is_ready());
        polled
    }
}

impl<S> Drop for Watched<S> {
    fn drop(&mut self) {
        self.note(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt as _;

    const SECOND: Duration = Duration::from_secs(1);

    fn blob(n: usize) -> (Digest, Kind) {
        (Digest::sha256(&n.to_le_bytes()), Kind::Blob)
    }

    /// Asks in the default domain about blobs that are missing.
    fn ask(claims: &Claims, push: &str, blobs: std::ops::Range<usize>, most: u64) -> Vec<usize> {
        ask_in(claims, "default", "a", push, blobs, most)
    }

    fn ask_in(claims: &Claims, domain: &str, repository: &str, push: &str, blobs: std::ops::Range<usize>, most: u64) -> Vec<usize> {
        let (domain, repository) = (domain.parse().unwrap(), repository.parse().unwrap());
        let asking = Asking { domain: &domain, repository: &repository, push: &PushId(push.into()), caller: &Caller::Anyone };
        claims.ask(&asking, blobs.map(|n| (n, blob(n))), most)
    }

    fn none() -> Vec<usize> {
        Vec::new()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_that_asks_sends_as_many_as_it_says_and_the_next_one_the_rest() {
        let claims = Claims::new();
        assert_eq!(ask(&claims, "one", 0..10, 4), none());
        assert_eq!(ask(&claims, "two", 0..10, 3), [0, 1, 2, 3]);
        assert_eq!(ask(&claims, "three", 0..10, 0), [0, 1, 2, 3, 4, 5, 6], "a question without a claim is answered too");
        assert_eq!(ask(&claims, "one", 0..10, 4), [4, 5, 6], "what it sends itself is not coming");
        assert_eq!(ask(&claims, "three", 0..10, 9), [0, 1, 2, 3, 4, 5, 6], "the same question claims no more than before");
        assert_eq!(ask(&claims, "two", 0..10, 0), [0, 1, 2, 3, 7, 8, 9]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_of_one_domain_and_of_one_kind() {
        let claims = Claims::new();
        assert_eq!(ask_in(&claims, "acme", "a", "one", 0..3, 3), none());
        assert_eq!(ask_in(&claims, "default", "a", "two", 0..3, 3), none());
        assert_eq!(ask_in(&claims, "acme", "b", "three", 0..3, 3), [0, 1, 2]);
        let (domain, repository) = ("acme".parse().unwrap(), "a".parse().unwrap());
        let asking = Asking { domain: &domain, repository: &repository, push: &PushId("four".into()), caller: &Caller::Anyone };
        assert_eq!(claims.ask(&asking, [(0, (blob(0).0, Kind::Run))].into_iter(), 1), none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_silent_loses_its_claims_to_one_other() {
        let claims = Claims::new();
        ask(&claims, "hung", 0..5, 5);
        tokio::time::advance(STALL - SECOND).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5);
        tokio::time::advance(SECOND).await;
        assert_eq!(ask(&claims, "two", 0..5, 5), none());
        assert_eq!(ask(&claims, "three", 0..5, 5).len(), 5, "only one takes over");
        assert_eq!(ask(&claims, "hung", 0..5, 5).len(), 5, "and the first one waits for it, if it still asks");
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_that_ends_or_whose_upload_fails_loses_its_claims_at_once() {
        let claims = Claims::new();
        let (here, elsewhere) = ("a".parse().unwrap(), "b".parse().unwrap());
        let other = "acme".parse().unwrap();
        ask(&claims, "one", 0..5, 5);
        for (domain, repository) in [(&DomainName::default(), &elsewhere), (&other, &here)] {
            claims.end(domain, repository, &PushId("one".into()));
            assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5, "a push of another repository or domain is not ended");
        }
        claims.end(&DomainName::default(), &here, &PushId("one".into()));
        assert_eq!(ask(&claims, "two", 0..5, 5), none());
        claims.upload(&PushId("two".into())).failed();
        assert_eq!(ask(&claims, "three", 0..5, 5), none());
        claims.upload(&PushId("never asked".into())).failed();
        assert_eq!(ask(&claims, "two", 0..5, 0).len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_does_not_stall_while_the_registry_works_on_its_upload_but_ends_in_time() {
        let claims = Claims::new();
        ask(&claims, "one", 0..5, 5);
        let upload = claims.upload(&PushId("one".into()));
        let (sender, receiver) = futures::channel::mpsc::unbounded::<u8>();
        let mut bytes = upload.watch(receiver);
        // It waits for its turn: nobody asks its client for bytes.
        tokio::time::advance(2 * STALL).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5);
        // Its client is waited for, and then sends.
        assert!(futures::poll!(bytes.next()).is_pending());
        tokio::time::advance(STALL - SECOND).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5);
        sender.unbounded_send(1).unwrap();
        assert_eq!(bytes.next().await, Some(1));
        tokio::time::advance(2 * STALL).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5, "the registry works on what came");
        // Its client is waited for in vain.
        assert!(futures::poll!(bytes.next()).is_pending());
        tokio::time::advance(STALL).await;
        assert_eq!(ask(&claims, "two", 0..5, 5), none());
        // However long the registry works, a claim ends.
        let _working = claims.upload(&PushId("two".into())).watch(futures::stream::pending::<u8>());
        tokio::time::advance(LONGEST - SECOND).await;
        assert_eq!(ask(&claims, "three", 0..5, 0).len(), 5);
        tokio::time::advance(SECOND).await;
        assert_eq!(ask(&claims, "three", 0..5, 0), none());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_what_has_ended_is_forgotten() {
        let claims = Claims::new();
        ask(&claims, "one", 0..MOST + 10, u64::MAX);
        assert_eq!(claims.0.lock().count, MOST);
        assert_eq!(ask(&claims, "two", MOST - 1..MOST + 10, 5), [MOST - 1], "what no memory is left for is sent by each");
        tokio::time::advance(LONGEST + SWEEP).await;
        assert_eq!(ask(&claims, "three", 0..1, 1), none());
        let inner = claims.0.lock();
        assert_eq!((inner.count, inner.pushes.len()), (1, 1));
    }
}
