//! The blobs of a push that are still to be sent, where other clients may be sending the same.
//!
//! Blobs are claimed just before they are sent, as many as one request carries, so that several
//! clients share the work and one that hangs keeps little from the others. Blobs that others send
//! are set aside, asked about again, and claimed here when the others did not send them.

use super::batch::Batch;
use super::session::{Answer, Claim, Session};
use crate::error::Result;
use crate::plan::{FRAME_OVERHEAD, Item, cut};
use pfr_schema::Kind;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// Blobs that a question is about, if it goes further than one request does.
const WIDEST: usize = 32 << 10;
/// Blobs in a question that only looks whether others have sent something.
const PROBE: usize = 256;
/// Least and longest time between two such questions.
const SOONEST: Duration = Duration::from_millis(50);
const LATEST: Duration = Duration::from_secs(1);
/// Longest time after which a claim ends, as far as a registry is believed.
const BELIEVED: u64 = 60;
/// The total of all waits, as a multiple of the longest one without progress: a client that sends a
/// blob now and then must not delay the others for ever.
const WAITS: u32 = 5;

/// How long a push waits for what others send.
///
/// Twice as long as a claim can last: so one other client sends the blobs that a slow one did not
/// send in its time, and not all that wait. Then each sends them, also if the registry says that
/// they come. Progress lets it wait anew, but in total no longer than [`WAITS`] times that.
pub(super) struct Patience {
    longest: Duration,
    /// Since when it waits in vain.
    since: Option<Instant>,
    pause: Duration,
    /// The sum of all pauses.
    waited: Duration,
}

impl Patience {
    /// For a registry whose claims last so many seconds.
    pub fn new(claim_seconds: u64) -> Self {
        let longest = Duration::from_secs(2 * claim_seconds.min(BELIEVED));
        Self { longest, since: None, pause: Duration::ZERO, waited: Duration::ZERO }
    }

    /// Something was sent, here or elsewhere.
    pub fn restore(&mut self) {
        (self.since, self.pause) = (None, Duration::ZERO);
    }

    /// Whether it has waited for long enough; the wait begins with the first look.
    pub fn is_over(&mut self) -> bool {
        let in_vain = self.since.get_or_insert_with(Instant::now).elapsed();
        in_vain >= self.longest || self.waited >= WAITS * self.longest
    }

    /// Waits as long as the registry said; longer each time.
    pub async fn wait(&mut self, told: Option<Duration>) {
        let least = told.unwrap_or(SOONEST).clamp(SOONEST, LATEST);
        self.pause = (2 * self.pause).clamp(least, LATEST);
        tokio::time::sleep(self.pause).await;
        self.waited += self.pause;
    }
}

/// How many plain blobs of these one request carries: one at least.
pub(super) fn carried<'i>(items: impl IntoIterator<Item = &'i Item>, limit: u64) -> usize {
    let mut bytes = 0_u64;
    let fitting = items.into_iter().filter(|item| item.kind == Kind::Blob).take_while(|item| {
        bytes = bytes.saturating_add(item.bytes().saturating_add(FRAME_OVERHEAD));
        bytes <= limit
    });
    fitting.count().max(1)
}

/// One of these, and another one each turn: a blob between the samples of one question may be
/// stored, or be free, while the samples themselves are coming. Turns step by the golden ratio, so
/// that few of them look at all parts of a long list.
fn sampled<T>(few: &[T], turn: u32) -> &T {
    let fraction = u64::from(turn.wrapping_mul(0x9e37_79b9));
    &few[((fraction * few.len() as u64) >> 32) as usize]
}

/// The blobs that are still to be sent.
pub(super) struct Queue<'a> {
    session: &'a Session<'a>,
    /// To be sent now.
    ready: VecDeque<Batch>,
    /// To be asked about.
    left: VecDeque<Item>,
    /// What others send.
    coming: Vec<Item>,
    patience: Patience,
    /// When the registry said to ask again.
    told: Option<Duration>,
    /// Questions so far that only looked.
    turn: u32,
    /// How many requests' worth of blobs the next question is about.
    widening: usize,
    /// Whether another client has sent everything.
    is_complete: bool,
}

impl<'a> Queue<'a> {
    /// Of requests that are sent without a further question.
    pub fn of(session: &'a Session<'a>, batches: Vec<Batch>) -> Self {
        Self { ready: batches.into(), ..Self::new(session, Vec::new(), &[]) }
    }

    /// Of the blobs of a plan, some of which are claimed already.
    pub fn new(session: &'a Session<'a>, mut blobs: Vec<Item>, claimed: &[bool]) -> Self {
        let mut ours = Vec::new();
        let mut claimed = claimed.iter();
        blobs.retain(|item| {
            let is_ours = claimed.next().is_some_and(|is_ours| *is_ours);
            if is_ours {
                ours.push(*item);
            }
            !is_ours
        });
        // If none could be claimed, others send all of it.
        let (left, coming) = if ours.is_empty() { (VecDeque::new(), blobs) } else { (blobs.into(), Vec::new()) };
        let mut queue = Self {
            session,
            ready: VecDeque::new(),
            left,
            coming,
            patience: Patience::new(session.claim_seconds()),
            told: None,
            turn: 0,
            widening: 1,
            is_complete: false,
        };
        queue.make_ready(ours);
        queue
    }

    /// Whether the registry has everything, because another client has sent it.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The next request; none when all blobs are stored, or have been handed out.
    pub async fn next(&mut self) -> Result<Option<Batch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            if !self.left.is_empty() {
                self.ask().await?;
            } else if !self.coming.is_empty() {
                self.wait().await?;
            } else {
                return Ok(None);
            }
        }
    }

    fn make_ready(&mut self, items: Vec<Item>) {
        let requests = cut(items, Item::bytes, self.session.request_bytes());
        self.ready.extend(requests.into_iter().map(|blobs| Batch { blobs: blobs.into(), ..Batch::default() }));
    }

    /// Asks about the next blobs, and claims what one request carries.
    async fn ask(&mut self) -> Result<()> {
        let most = carried(&self.left, self.session.request_bytes());
        let window = most.saturating_mul(self.widening).min(WIDEST.max(most)).min(self.left.len());
        let items: Vec<Item> = self.left.drain(..window).collect();
        let asked = self.session.ask(&items, Claim::Blobs(most)).await?;
        let (mut ours, mut unclaimed) = (Vec::new(), Vec::new());
        // Without claims all that is missing is sent from here.
        let knows_claims = self.session.claim_seconds() > 0;
        for (at, item) in items.into_iter().enumerate() {
            match asked.of(at) {
                Answer::Stored => self.stored(&item),
                Answer::Missing if !knows_claims => ours.push(item),
                Answer::Ours => ours.push(item),
                Answer::Coming => self.coming.push(item),
                Answer::Missing => unclaimed.push(item),
            }
        }
        for item in unclaimed.into_iter().rev() {
            self.left.push_front(item);
        }
        // Where others send most of it, further blobs are looked at, to find some that are not
        // sent.
        self.widening = if ours.len() * 2 < most { (2 * self.widening).min(WIDEST) } else { 1 };
        self.told = asked.wait;
        if !ours.is_empty() {
            self.patience.restore();
        }
        self.make_ready(ours);
        Ok(())
    }

    /// Waits until others have sent some of it, or do not send it any more.
    async fn wait(&mut self) -> Result<()> {
        while !self.patience.is_over() {
            let waiting = tracing::info_span!("wait", "otel.name" = "wait for another push");
            self.patience.wait(self.told).await;
            drop(waiting);
            // One of each few: what one client sends is stored at once.
            let step = self.coming.len().div_ceil(PROBE);
            let mut probe: Vec<Item> = self.coming.chunks(step).map(|few| *sampled(few, self.turn)).collect();
            self.turn = self.turn.wrapping_add(1);
            probe.push(self.session.manifest());
            let asked = self.session.ask(&probe, Claim::Blobs(0)).await?;
            self.told = asked.wait;
            if asked.of(probe.len() - 1) == Answer::Stored {
                // A stored manifest holds all that it lists.
                for item in std::mem::take(&mut self.coming) {
                    self.stored(&item);
                }
                self.is_complete = true;
                return Ok(());
            }
            let mut coming = Vec::new();
            for (at, items) in std::mem::take(&mut self.coming).chunks(step).enumerate() {
                if asked.of(at) == Answer::Coming {
                    coming.extend_from_slice(items);
                } else {
                    self.left.extend(items);
                }
            }
            self.coming = coming;
            if !self.left.is_empty() {
                return Ok(());
            }
        }
        tracing::debug!(blobs = self.coming.len(), "others did not send in time, sending it here");
        let items = std::mem::take(&mut self.coming);
        self.patience.restore();
        self.make_ready(items);
        Ok(())
    }

    fn stored(&mut self, item: &Item) {
        self.session.stored_elsewhere(item.bytes());
        self.patience.restore();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;
    use std::collections::HashSet;

    fn item(kind: Kind, size: u64) -> Item {
        Item { digest: Digest::sha256(&size.to_le_bytes()), kind, size: Some(size), elements: None }
    }

    #[test]
    fn a_question_claims_what_one_request_carries() {
        let blobs = |sizes: &[u64]| sizes.iter().map(|size| item(Kind::Blob, *size)).collect::<Vec<_>>();
        assert_eq!(carried(&blobs(&[100, 100, 100]), 2 * (100 + FRAME_OVERHEAD)), 2);
        assert_eq!(carried(&blobs(&[1000, 1]), 100), 1, "a large blob goes alone");
        assert_eq!(carried(&blobs(&[]), 100), 1);
        assert_eq!(carried(&[item(Kind::Run, 1), item(Kind::Blob, 1), item(Kind::Tree, 1), item(Kind::Blob, 2)], 1000), 2);
    }

    #[test]
    fn another_blob_is_looked_at_each_turn_until_all_were() {
        for count in [1, 2, 3, 16, 100] {
            let few: Vec<usize> = (0..count).collect();
            let seen = |turns: usize| (0..turns as u32).map(|turn| *sampled(&few, turn)).collect::<HashSet<usize>>().len();
            assert_eq!(seen(3 * count), count, "of {count}");
            sampled(&few, u32::MAX);
        }
        let hundred: Vec<usize> = (0..100).collect();
        assert_eq!([0, 1, 2, 3, 4].map(|turn| *sampled(&hundred, turn)), [0, 61, 23, 85, 47], "few turns look at all parts");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_waits_longer_each_time_and_not_for_ever() {
        let mut patience = Patience::new(1);
        let mut pauses = Vec::new();
        while !patience.is_over() {
            let before = Instant::now();
            patience.wait(Some(Duration::from_millis(200))).await;
            pauses.push(before.elapsed().as_millis());
        }
        assert_eq!(pauses, [200, 400, 800, 1000]);
        patience.restore();
        patience.wait(Some(Duration::from_secs(3600))).await;
        assert!(!patience.is_over(), "a registry cannot make it wait for an hour");
        assert_eq!(Patience::new(u64::MAX).longest, Duration::from_secs(2 * BELIEVED));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_does_not_wait_for_ever_although_a_blob_is_stored_now_and_then() {
        let (mut patience, start) = (Patience::new(1), Instant::now());
        while !patience.is_over() {
            patience.wait(None).await;
            patience.restore();
            assert!(start.elapsed() < Duration::from_secs(3600), "it waits for ever");
        }
        assert_eq!(start.elapsed().as_secs(), u64::from(WAITS) * 2);
        patience.restore();
        assert!(patience.is_over(), "it would wait again for each blob that is left");
    }
}
