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
//! it is waited for, or claims in [`HELD`] later questions, and in any case after [`LONGEST`]. A
//! stored blob is not missing, so its claim is not looked at any more, except by a caller that does
//! not see the snapshot: for it the manifest stays missing, and so the commit ends the claim.
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
use std::sync::atomic::{AtomicUsize, Ordering};
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
/// The same of one domain and of one push: neither can keep claims from all others.
const MOST_OF_DOMAIN: usize = MOST / 2;
const MOST_OF_PUSH: usize = MOST / 8;
/// A push keeps the claims of so many of its latest questions that claim, and those that its
/// uploads may still send: what it claimed before is stored.
const HELD: u64 = 3;
/// How often claims that have ended are forgotten.
const SWEEP: Duration = Duration::from_secs(2);

/// The claims of this process.
pub(crate) struct Claims(Mutex<Inner>);

struct Inner {
    /// Claims by domain: what one domain stores says nothing about another. A blob may have several
    /// claims of pushes that may not know of each other.
    domains: HashMap<DomainName, Blobs>,
    pushes: HashMap<PushId, Arc<Push>>,
    /// Claims in all domains, also those that have ended and are not forgotten yet.
    count: usize,
    swept: Instant,
}

/// The claims of one domain.
#[derive(Default)]
struct Blobs {
    claims: HashMap<(Digest, Kind), Vec<Claim>>,
    /// How many, as in [`Inner::count`].
    count: usize,
}

struct Claim {
    push: Arc<Push>,
    /// The latest question of its push that claimed the blob.
    question: u64,
    at: Instant,
}

impl Claim {
    fn new(push: &Arc<Push>, question: u64, at: Instant) -> Self {
        push.claims.fetch_add(1, Ordering::Relaxed);
        Self { push: Arc::clone(push), question, at }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.push.claims.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A push that has made claims.
struct Push {
    domain: DomainName,
    repository: RepositoryName,
    /// Its claims in memory, also those that have ended.
    claims: AtomicUsize,
    /// Its uploads that are under way: the number of its latest question when they began.
    uploads: Mutex<Vec<u64>>,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct State {
    /// Questions that claimed.
    questions: u64,
    /// The claims of so many of them have ended.
    ended: u64,
    /// Uploads and questions on which the registry works, rather than waits for their client.
    working: u32,
    /// When the client last asked or sent something.
    moved: Instant,
}

impl State {
    /// Whether a claim of the push still holds.
    fn keeps(&self, claim: &Claim, now: Instant) -> bool {
        claim.question > self.ended
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

    /// Answers a question about groups of blobs: the positions of those that other pushes send. A
    /// group has its missing blobs, and a number: so many of those that no other push sends, the
    /// first ones, are claimed for the push that asks. Forgets the claims of blobs that are
    /// `stored`.
    pub(crate) fn ask<M>(
        &self,
        asking: &Asking<'_>,
        stored: impl Iterator<Item = (Digest, Kind)>,
        groups: impl Iterator<Item = (M, u64)>,
    ) -> Vec<usize>
    where
        M: Iterator<Item = (usize, (Digest, Kind))>,
    {
        let groups: Vec<(M, u64)> = groups.collect();
        let may_claim = groups.iter().any(|(_, most)| *most > 0);
        let now = Instant::now();
        let mut inner = self.0.lock();
        inner.sweep(now);
        let own = inner.push(asking, may_claim, now);
        let question = own.as_ref().filter(|_| may_claim).map_or(0, |own| own.next_question());
        let Inner { domains, count, .. } = &mut *inner;
        let blobs = domains.entry(asking.domain.clone()).or_default();
        // A manifest may be hidden from the push that claimed it, and is missing for that one.
        for name in stored.filter(|(_, kind)| *kind != Kind::Manifest) {
            let before = blobs.claims.remove(&name).map_or(0, |claims| claims.len());
            blobs.count -= before;
            *count -= before;
        }
        // Claims of one push lie side by side, so the last one that was looked at is remembered.
        let mut known: Option<Known> = None;
        let (mut coming, mut claimed, mut lapsed) = (Vec::new(), 0_u64, 0_u64);
        for (missing, most) in groups {
            let mut free = 0_u64;
            for (position, name) in missing {
                let (mut is_coming, mut is_own) = (false, false);
                for claim in blobs.claims.get_mut(&name).into_iter().flatten() {
                    if known.as_ref().is_none_or(|known| !Arc::ptr_eq(&known.push, &claim.push)) {
                        known = Some(Known::of(claim, own.as_ref(), asking));
                    }
                    if let Some(known) = &known
                        && known.state.keeps(claim, now)
                    {
                        is_coming |= known.is_waited_for;
                        if known.is_own {
                            is_own = true;
                            if free < most {
                                claim.question = question;
                            }
                        }
                    }
                }
                if is_coming && !is_own {
                    coming.push(position);
                    continue;
                }
                free += 1;
                let Some(own) = &own else { continue };
                let is_full = *count >= MOST || blobs.count >= MOST_OF_DOMAIN || own.claims.load(Ordering::Relaxed) >= MOST_OF_PUSH;
                if is_own || free > most || is_full {
                    continue;
                }
                let claims = blobs.claims.entry(name).or_default();
                let before = claims.len();
                claims.retain(|claim| {
                    let holds = claim.push.state.lock().keeps(claim, now);
                    lapsed += u64::from(!holds && !Arc::ptr_eq(&claim.push, own));
                    holds
                });
                *count = *count + 1 + claims.len() - before;
                blobs.count = blobs.count + 1 + claims.len() - before;
                claims.reserve_exact(1);
                claims.push(Claim::new(own, question, now));
                claimed += 1;
            }
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
            push.release(u64::MAX);
        }
    }

    /// A question of a push, which begins now. While the registry looks for the answer, the claims
    /// that the push has made do not lapse: its client is not waited for.
    pub(crate) fn question(&self, push: &PushId) -> Question {
        let push = self.0.lock().pushes.get(push).cloned();
        if let Some(push) = &push {
            push.works(true);
        }
        Question(push)
    }

    /// An upload of a push, which begins now.
    pub(crate) fn upload(&self, push: &PushId) -> Upload {
        let push = self.0.lock().pushes.get(push).cloned();
        let question = push.as_ref().map_or(0, |push| push.state.lock().questions);
        if let Some(push) = &push {
            push.uploads.lock().push(question);
        }
        Upload { push, question }
    }
}

impl Inner {
    /// The push that asks, if it has made claims, or makes some now.
    fn push(&mut self, asking: &Asking<'_>, claims: bool, now: Instant) -> Option<Arc<Push>> {
        let found = self.pushes.get(asking.push).cloned();
        let push = found.or_else(|| {
            claims.then(|| {
                let push = Arc::new(Push {
                    domain: asking.domain.clone(),
                    repository: asking.repository.clone(),
                    claims: AtomicUsize::new(0),
                    uploads: Mutex::default(),
                    state: Mutex::new(State { questions: 0, ended: 0, working: 0, moved: now }),
                });
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
            blobs.claims.retain(|_, claims| {
                claims.retain(|claim| claim.push.state.lock().keeps(claim, now));
                !claims.is_empty()
            });
            blobs.count = blobs.claims.values().map(Vec::len).sum();
            blobs.count > 0
        });
        self.count = self.domains.values().map(|blobs| blobs.count).sum();
        // Uploads and claims hold theirs.
        self.pushes.retain(|_, push| Arc::strong_count(push) > 1 || now.saturating_duration_since(push.state.lock().moved) < LONGEST);
    }
}

impl Push {
    /// Counts a question that claims, and ends the claims of those that lie far enough back.
    fn next_question(&self) -> u64 {
        let oldest_upload = self.uploads.lock().iter().min().copied();
        let mut state = self.state.lock();
        state.questions += 1;
        let over = oldest_upload.unwrap_or(u64::MAX).min(state.questions).saturating_sub(HELD);
        state.ended = state.ended.max(over);
        state.questions
    }

    /// Whether the registry works for its client from now on, rather than waits for it.
    fn works(&self, begins: bool) {
        let mut state = self.state.lock();
        if begins {
            state.working += 1;
        } else {
            state.working -= 1;
        }
        state.moved = Instant::now();
    }

    /// Ends the claims of its questions up to this one, of those that it has asked so far.
    fn release(&self, question: u64) {
        let mut state = self.state.lock();
        state.ended = state.ended.max(question.min(state.questions));
    }
}

/// A question of a push that the registry looks for an answer to.
pub(crate) struct Question(Option<Arc<Push>>);

impl Drop for Question {
    fn drop(&mut self) {
        if let Some(push) = &self.0 {
            push.works(false);
        }
    }
}

/// An upload of a push.
pub(crate) struct Upload {
    push: Option<Arc<Push>>,
    /// The latest question of its push when it began.
    question: u64,
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(push) = &self.push else { return };
        let mut uploads = push.uploads.lock();
        if let Some(at) = uploads.iter().position(|question| *question == self.question) {
            uploads.swap_remove(at);
        }
    }
}

impl Upload {
    /// The same bytes. The push does not stall while the registry works on them.
    pub(crate) fn watch<S>(&self, stream: S) -> Watched<S> {
        let mut watched = Watched { stream, push: self.push.clone(), is_working: false };
        watched.note(true);
        watched
    }

    /// Ends the claims that its push made before it began, because its client may never try again.
    /// Other uploads send the blobs that the push claimed since.
    pub(crate) fn failed(&self) {
        if let Some(push) = &self.push {
            push.release(self.question);
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
        match (self.is_working, is_working) {
            (false, false) => return,
            (true, true) => push.state.lock().moved = Instant::now(),
            _ => push.works(is_working),
        }
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
        claims.ask(&asking, std::iter::empty(), std::iter::once((blobs.map(|n| (n, blob(n))), most)))
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
        let group = ([(0, (blob(0).0, Kind::Run))].into_iter(), 1);
        assert_eq!(claims.ask(&asking, std::iter::empty(), std::iter::once(group)), none());
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
        // It waits for its turn: its client is not asked for bytes.
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
    async fn a_push_does_not_stall_while_the_registry_looks_for_an_answer() {
        let claims = Claims::new();
        let push = PushId("one".into());
        drop(claims.question(&push));
        ask(&claims, "one", 0..5, 5);
        let slow = claims.question(&push);
        tokio::time::advance(2 * STALL).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5, "a database that is slow is no silent client");
        let second = claims.question(&push);
        drop(slow);
        tokio::time::advance(STALL).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5);
        drop(second);
        tokio::time::advance(STALL - SECOND).await;
        assert_eq!(ask(&claims, "two", 0..5, 5).len(), 5, "the client has its time from the answer on");
        tokio::time::advance(SECOND).await;
        assert_eq!(ask(&claims, "two", 0..5, 5), none());
        // However long the registry looks, a claim ends.
        let _slow = claims.question(&PushId("two".into()));
        tokio::time::advance(LONGEST).await;
        assert_eq!(ask(&claims, "three", 0..5, 0), none());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_what_has_ended_is_forgotten() {
        let claims = Claims::new();
        ask(&claims, "one", 0..MOST, u64::MAX);
        assert_eq!(claims.0.lock().count, MOST_OF_PUSH);
        let last = MOST_OF_PUSH - 1;
        assert_eq!(ask(&claims, "two", last..MOST_OF_PUSH + 10, 5), [last], "what no memory is left for is sent by each");
        assert_eq!(ask(&claims, "three", last + 1..last + 10, 0).len(), 5, "and others still claim");
        let mut next = MOST;
        for (domain, in_all) in [("default", MOST_OF_DOMAIN), ("acme", MOST), ("third", MOST)] {
            for push in 0..5 {
                ask_in(&claims, domain, "a", &format!("{domain}-{push}"), next..next + MOST_OF_PUSH, u64::MAX);
                next += MOST_OF_PUSH;
            }
            assert_eq!(claims.0.lock().count, in_all, "{domain}");
        }
        tokio::time::advance(LONGEST + SWEEP).await;
        assert_eq!(ask(&claims, "three", 0..1, 1), none());
        let inner = claims.0.lock();
        assert_eq!((inner.count, inner.pushes.len()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stored_blob_takes_no_place_and_a_manifest_keeps_its_claim() {
        let claims = Claims::new();
        ask(&claims, "one", 0..10, 10);
        let (domain, repository) = (DomainName::default(), "a".parse().unwrap());
        let asking = Asking { domain: &domain, repository: &repository, push: &PushId("one".into()), caller: &Caller::Anyone };
        let manifest = (blob(0).0, Kind::Manifest);
        claims.ask(&asking, std::iter::empty(), std::iter::once(([(0, manifest)].into_iter(), 1)));
        let asking = Asking { push: &PushId("two".into()), ..asking };
        let left = (8..10).map(|n| (n, blob(n)));
        let stored = (0..8).map(blob).chain([manifest]);
        assert_eq!(claims.ask(&asking, stored, std::iter::once((left, 0))), [8, 9]);
        let inner = claims.0.lock();
        assert_eq!((inner.count, inner.domains[&domain].count), (3, 3), "two blobs and the manifest");
        assert_eq!(inner.pushes[&PushId("one".into())].claims.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_keeps_its_latest_claims_and_those_of_its_uploads() {
        let claims = Claims::new();
        for n in 0..10 {
            ask(&claims, "one", 10 * n..10 * n + 10, 10);
        }
        assert_eq!(ask(&claims, "two", 0..100, 0), (70..100).collect::<Vec<_>>(), "what it claimed before is stored");
        let upload = claims.upload(&PushId("one".into()));
        for n in 10..20 {
            ask(&claims, "one", 10 * n..10 * n + 10, 10);
        }
        assert_eq!(ask(&claims, "two", 0..200, 0), (70..200).collect::<Vec<_>>(), "its upload sends some of it");
        drop(upload);
        // What it asks about once more is claimed once more.
        ask(&claims, "one", 170..180, 10);
        ask(&claims, "one", 200..210, 10);
        assert_eq!(ask(&claims, "two", 0..210, 0), (170..180).chain(190..210).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_fails_ends_no_claim_that_was_made_after_it_began() {
        let claims = Claims::new();
        let push = PushId("one".into());
        ask(&claims, "one", 0..5, 5);
        let first = claims.upload(&push);
        ask(&claims, "one", 5..10, 5);
        let second = claims.upload(&push);
        first.failed();
        assert_eq!(ask(&claims, "two", 0..10, 0), [5, 6, 7, 8, 9]);
        second.failed();
        assert_eq!(ask(&claims, "two", 0..10, 0), none());
    }
}
