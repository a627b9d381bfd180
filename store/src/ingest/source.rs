//! Reading an upload: in a place at full speed, and with next to no memory while its client is
//! slow.
//!
//! A place among [`crate::Options::ingests`] covers the memory of an upload at full speed, about 20
//! MiB. An upload reads [`WINDOW`] bytes before it takes one. If none is free, it reads to the end
//! of its first frame, or of the frame that it is in. It gives the place back when it mostly waits
//! for its client and others want it. The bytes beyond a window that it holds without a place count
//! against [`crate::Options::slow_bytes`], which all slow uploads share: if these are spent, the
//! slowest upload is refused.

use crate::Store;
use crate::error::{Error, Result};
use crate::verify::WHOLE_MAX;
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use pfr_schema::Algorithm;
use pfr_schema::frame::{Event, Header, Parser};
use pfr_service::memory::{Pace, Part, Refused};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Bytes that any upload may hold without a place.
const WINDOW: u64 = 64 << 10;
/// Bytes that contain a whole header of a frame.
const HEADER: usize = Header::len(Algorithm::Sha512);
/// Pieces smaller than this are joined: each may keep a whole read buffer alive, and a list of them
/// costs more than their bytes.
const CRUMB: usize = 16 << 10;
/// Time for which an upload in a place may wait for its client before others come first.
const LINGER: Duration = Duration::from_millis(20);
/// Time after which an upload in a place lets others have a turn, however fast it is.
const SLICE: Duration = Duration::from_secs(10);
/// How many times as long an upload waits for a place once it had one.
const AGAIN: u32 = 4;
/// Bytes a second below which an upload that cannot give its place back is refused.
const SLOW: f64 = (1 << 20) as f64;
/// Seconds for which a client that sent faster than that may then be waited for: a stall of its
/// network, or a busy processor, does not make it slow.
const CREDIT: f64 = 0.25;
/// Time for which a client may be waited for while others wait for the one place for large
/// documents.
const LARGE_LINGER: Duration = Duration::from_secs(2);
/// Time after which a read that brought nothing returns, so that leases are renewed and others are
/// noticed.
const TICK: Duration = Duration::from_secs(1);

const NO_PLACE: &str = "the registry is busy with other uploads";
const NO_MEMORY: &str = "slow uploads hold as much memory as they may";
const SLOWEST: &str = "this upload is slow, and other uploads need its memory";
const IN_THE_WAY: &str = "this upload is slow, and others waited for its place";

/// The frame that the verifier is working on.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    /// Bytes to the end of the frame that is held until it is complete.
    pub rest: Option<u64>,
    /// Whether that is a large document, of which there is one at a time.
    pub large: bool,
}

/// The outcome of a read.
pub(crate) enum Read {
    Bytes(Bytes),
    /// Others want the place: hand on what is complete, then call [`Source::leave`].
    Leave,
    /// Nothing yet.
    Tick,
    End(Result<()>),
}

/// The outcome of reading without a place.
enum Gathered {
    Bytes,
    /// Nothing came for a while.
    Nothing,
    /// There is no memory for more.
    NoMemory,
}

/// An upload's bytes.
pub(crate) struct Source<'a, S> {
    store: &'a Store,
    stream: S,
    place: Option<OwnedSemaphorePermit>,
    /// Whether it had a place before.
    entered: bool,
    /// The memory for more than a window without a place.
    extra: Part,
    pace: Pace,
    /// Bytes that the upload holds elsewhere while it has no place.
    elsewhere: u64,
    crumbs: BytesMut,
    ready: VecDeque<Bytes>,
    ended: Option<Result<()>>,
    /// When the place was taken, and the time spent in it waiting for the client.
    since: Instant,
    waited: Duration,
    /// Seconds for which the client may still be waited for: see [`CREDIT`].
    credit: f64,
    /// Time for which the client was waited for while a large document is held.
    large_waited: Duration,
}

impl<'a, S: Stream<Item = Result<Bytes>> + Send + Unpin> Source<'a, S> {
    pub(crate) fn new(store: &'a Store, stream: S) -> Self {
        let pace = Pace::default();
        Self {
            store,
            stream,
            place: None,
            entered: false,
            extra: store.slow.part(&pace),
            pace,
            elsewhere: 0,
            crumbs: BytesMut::new(),
            ready: VecDeque::new(),
            ended: None,
            since: Instant::now(),
            waited: Duration::ZERO,
            credit: 0.0,
            large_waited: Duration::ZERO,
        }
    }

    /// The next bytes. They are handed out only while the upload has a place.
    ///
    /// # Errors
    /// [`Error::Overloaded`]. Errors of the stream itself are in [`Read::End`].
    pub(crate) async fn read(&mut self, wanted: Wanted) -> Result<Read> {
        if !wanted.large {
            self.large_waited = Duration::ZERO;
        } else if self.large_waited > LARGE_LINGER && self.store.large.wanted() {
            return Err(Error::Overloaded(IN_THE_WAY));
        }
        loop {
            if self.place.is_none() {
                // A frame that is nearly complete, or a part of a large document.
                let rest = wanted.rest.filter(|_| !wanted.large).or_else(|| self.first_frame());
                let target = WINDOW.max(rest.unwrap_or(0)).min(WHOLE_MAX);
                if self.ended.is_none() && self.ready.is_empty() && (self.crumbs.len() as u64) < target {
                    // An upload that can take a place at once does not wait for a whole frame.
                    if self.crumbs.len() as u64 >= WINDOW
                        && let Some(place) = self.store.ingests.try_take()
                    {
                        self.work(place);
                        continue;
                    }
                    match self.gather(target).await? {
                        Gathered::Bytes => continue,
                        Gathered::Nothing => return Ok(Read::Tick),
                        Gathered::NoMemory => {}
                    }
                }
                self.enter().await?;
            }
            if let Some(bytes) = self.ready.pop_front() {
                return Ok(Read::Bytes(bytes));
            }
            if let Some(end) = self.ended.take() {
                return Ok(Read::End(end));
            }
            if self.is_in_the_way() {
                return Ok(Read::Leave);
            }
            if let Some(nothing) = self.receive(wanted.rest).await {
                return Ok(nothing);
            }
        }
    }

    /// Takes a place, which covers what the upload holds from now on.
    pub(crate) async fn enter(&mut self) -> Result<()> {
        if self.place.is_none() {
            // An upload that gave its place back is waited for by a client that has sent much
            // already.
            let limit = self.store.options.queue * if self.entered { AGAIN } else { 1 };
            self.queues();
            let place = self.store.ingests.take(limit, NO_PLACE).await?;
            self.work(place);
        }
        Ok(())
    }

    fn work(&mut self, place: OwnedSemaphorePermit) {
        self.place = Some(place);
        self.entered = true;
        self.flush();
        self.extra.release();
        self.elsewhere = 0;
        self.stay();
    }

    /// Until it enters again, the upload waits for other uploads and not for its client.
    pub(crate) fn queues(&self) {
        self.extra.complete();
    }

    /// Gives the place back if there is memory to hold `held` bytes without one; else the upload
    /// keeps it, and the answer is false.
    pub(crate) fn try_leave(&mut self, held: u64) -> bool {
        let left = self.extra.try_hold(beyond_window(held + self.crumbs.len() as u64));
        if left {
            (self.elsewhere, self.place) = (held, None);
        }
        left
    }

    /// The same, and slower uploads make room.
    pub(crate) async fn leave(&mut self, held: u64) -> bool {
        let left = self.extra.hold(beyond_window(held + self.crumbs.len() as u64), LINGER).await.is_ok();
        if left {
            (self.elsewhere, self.place) = (held, None);
        }
        left
    }

    /// Keeps the place for another while.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if the upload is so slow that others must not wait for it.
    pub(crate) fn keep(&mut self) -> Result<()> {
        if self.waited >= LINGER && self.credit <= 0.0 {
            return Err(Error::Overloaded(IN_THE_WAY));
        }
        self.stay();
        Ok(())
    }

    fn stay(&mut self) {
        (self.since, self.waited) = (Instant::now(), Duration::ZERO);
    }

    /// Bytes of the first frame, if its header is there and no place was needed for it before.
    fn first_frame(&self) -> Option<u64> {
        if self.entered {
            return None;
        }
        let mut parser = Parser::new(self.store.options.limits.clone());
        parser.push(Bytes::copy_from_slice(&self.crumbs[..self.crumbs.len().min(HEADER)]));
        match parser.next() {
            Ok(Some(Event::Begin(header))) => Some(header.frame_len()).filter(|bytes| *bytes <= WHOLE_MAX),
            _ => None,
        }
    }

    /// Counts time in which the client was waited for, and what came in it.
    fn account(&mut self, waited: Duration, received: Option<&Result<Bytes>>) {
        self.large_waited += waited;
        let bytes = received.and_then(|bytes| bytes.as_ref().ok()).map_or(0, Bytes::len);
        self.pace.received(bytes);
        self.credit = ((self.credit - waited.as_secs_f64()).max(0.0) + bytes as f64 / SLOW).min(CREDIT);
    }

    /// Whether others wait for the place and the upload mostly waits for its client, or has had its
    /// turn.
    fn is_in_the_way(&self) -> bool {
        let held = self.since.elapsed();
        self.store.ingests.wanted() && ((self.waited >= LINGER && self.waited * 2 >= held) || held >= SLICE)
    }

    /// Receives in a place. Returns what to do instead, if others want the place first, or nothing
    /// comes for a while.
    async fn receive(&mut self, rest: Option<u64>) -> Option<Read> {
        let (begun, before, since) = (Instant::now(), self.waited, self.since);
        self.pace.wait();
        let places = &self.store.ingests;
        let others = async {
            tokio::time::sleep(LINGER.saturating_sub(before)).await;
            loop {
                places.when_wanted().await;
                if (before + begun.elapsed()) * 2 >= since.elapsed() {
                    return;
                }
                tokio::time::sleep(LINGER).await;
            }
        };
        let received = tokio::select! {
            biased;
            received = self.stream.next() => Ok(received),
            () = others => Err(Read::Leave),
            () = tokio::time::sleep(TICK) => Err(Read::Tick),
        };
        let waited = begun.elapsed();
        self.waited += waited;
        self.account(waited, received.as_ref().ok().and_then(Option::as_ref));
        let received = match received {
            Ok(received) => received,
            Err(nothing) => return Some(nothing),
        };
        match received {
            Some(Ok(bytes)) => {
                if bytes.len() >= CRUMB {
                    self.flush();
                    self.ready.push_back(bytes);
                } else {
                    self.crumbs.extend_from_slice(&bytes);
                    // The end of a large document must not lie here: others wait for it.
                    if self.crumbs.len() >= CRUMB || rest.is_some_and(|rest| self.crumbs.len() as u64 >= rest) {
                        self.flush();
                    }
                }
            }
            Some(Err(error)) => self.close(Err(error)),
            None => self.close(Ok(())),
        }
        None
    }

    /// Receives without a place until a window or `target` bytes are there, or the end.
    async fn gather(&mut self, target: u64) -> Result<Gathered> {
        let deadline = Instant::now() + TICK;
        while (self.crumbs.len() as u64) < target {
            let begun = Instant::now();
            self.pace.wait();
            let received = tokio::select! {
                biased;
                () = self.extra.must_leave() => return Err(Error::Overloaded(SLOWEST)),
                received = tokio::time::timeout_at(deadline, self.stream.next()) => received,
            };
            self.account(begun.elapsed(), received.as_ref().ok().and_then(Option::as_ref));
            match received {
                Err(_) => return Ok(Gathered::Nothing),
                Ok(Some(Ok(bytes))) => {
                    self.crumbs.extend_from_slice(&bytes);
                    // A complete window waits for a place, and no longer for the client.
                    if (self.crumbs.len() as u64) < target && !self.reserve(self.elsewhere + self.crumbs.len() as u64).await? {
                        return Ok(Gathered::NoMemory);
                    }
                    if self.crumbs.len() as u64 >= WINDOW {
                        // Perhaps the header shows how long the frame is, or a place is free.
                        break;
                    }
                }
                Ok(Some(Err(error))) => self.close(Err(error)),
                Ok(None) => self.close(Ok(())),
            }
            if self.ended.is_some() {
                break;
            }
        }
        Ok(Gathered::Bytes)
    }

    fn close(&mut self, result: Result<()>) {
        self.flush();
        self.ended = Some(result);
    }

    fn flush(&mut self) {
        if !self.crumbs.is_empty() {
            self.ready.push_back(std::mem::take(&mut self.crumbs).freeze());
        }
    }

    /// Waits for memory to hold so many bytes without a place. False if the upload had better wait
    /// for its first place.
    async fn reserve(&mut self, held: u64) -> Result<bool> {
        // A little more, so that not every piece asks again.
        let bytes = beyond_window(held).next_multiple_of(32 << 10);
        let limit = if self.entered { self.store.options.queue } else { LINGER };
        match self.extra.hold(bytes, limit).await {
            Ok(()) => Ok(true),
            Err(Refused::Slow) => Err(Error::Overloaded(SLOWEST)),
            Err(Refused::Spent) if self.entered => Err(Error::Overloaded(NO_MEMORY)),
            Err(Refused::Spent) => Ok(false),
        }
    }
}

/// The bytes that count if an upload holds `held` without a place.
fn beyond_window(held: u64) -> usize {
    usize::try_from(held.saturating_sub(WINDOW)).unwrap_or(usize::MAX)
}
