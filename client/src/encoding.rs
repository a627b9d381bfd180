//! Encoding of what a transfer sends or stores, on the threads that read it.
//!
//! `hot` is for links that take bytes more slowly than they are encoded. Whether this is one is
//! measured, not assumed: the threads add up the time in which they encode and the time in which
//! they wait for the receiver. If they encode for longer than they wait, sending raw may be faster.
//! Then the next [`WINDOW`] is sent raw, and stays raw if that was faster by a tenth. The other way
//! round, a link that keeps raw bytes waiting for longer than encoding takes is tried with encoded
//! ones. A trial that brings nothing is repeated after a wait that doubles. `cold` is for small
//! copies, at any speed.

use parking_lot::Mutex;
use pfr_schema::checkpoint::Dtype;
use pfr_schema::codec::{BlobEncoder, Codec, Codecs, Compression};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a blob at most that is encoded: it and its encoding are held in memory, for each
/// thread. Larger blobs stay raw.
pub const MOST: u64 = 16 << 20;
/// Raw bytes between two decisions.
const WINDOW: u64 = 64 << 20;
/// A trial must take at most so much of the time of the window before it to be kept.
const FASTER: f64 = 0.9;
/// Windows between two trials at most.
const LONGEST_PAUSE: u32 = 64;

/// How the blobs of one transfer are encoded. Cheap to clone; clones measure and count together.
#[derive(Clone, Debug)]
pub struct Encoding {
    shared: Arc<Shared>,
    left_raw: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Shared {
    compression: Compression,
    codecs: Codecs,
    pace: Mutex<Pace>,
}

impl Encoding {
    /// Encoding for a receiver that takes these codecs.
    #[must_use]
    pub fn new(compression: Compression, codecs: Codecs) -> Self {
        let shared = Shared { compression, codecs, pace: Mutex::new(Pace::new(Instant::now())) };
        Self { shared: Arc::new(shared), left_raw: Arc::default() }
    }

    /// The same encoding with a count of its own, which begins at zero: for one try of a request.
    #[must_use]
    pub fn with_own_count(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), left_raw: Arc::default() }
    }

    /// Codecs that the receiver takes.
    #[must_use]
    pub fn codecs(&self) -> Codecs {
        self.shared.codecs
    }

    /// Bytes that stayed raw because the receiver took them faster raw, or to find that out.
    #[must_use]
    pub fn left_raw(&self) -> u64 {
        self.left_raw.load(Ordering::Relaxed)
    }

    /// An encoder for one thread.
    #[must_use]
    pub fn encoder(&self) -> Encoder {
        let blobs = BlobEncoder::new(self.shared.compression, self.shared.codecs);
        Encoder { encoding: self.clone(), blobs }
    }
}

/// Encodes blobs, one after the other.
pub struct Encoder {
    encoding: Encoding,
    blobs: BlobEncoder,
}

impl Encoder {
    /// Codec and payload of a blob whose elements have this type, if it is known; `None` if it
    /// stays raw.
    pub fn encode(&mut self, raw: &[u8], elements: Option<Dtype>) -> Option<(Codec, Cow<'_, [u8]>)> {
        if raw.len() as u64 > MOST {
            return None;
        }
        // Zeros are left out in any case.
        if self.blobs.codec(elements).is_none() {
            return self.blobs.encode(raw, None);
        }
        let Encoding { shared, left_raw } = &self.encoding;
        if shared.compression != Compression::Hot {
            return self.blobs.encode(raw, elements);
        }
        let (start, encodes) = (Instant::now(), shared.pace.lock().encodes);
        let encoded = self.blobs.encode(raw, elements.filter(|_| encodes));
        // Zeros are left out of the others.
        if !encodes && encoded.is_none() {
            left_raw.fetch_add(raw.len() as u64, Ordering::Relaxed);
        }
        let end = Instant::now();
        let encoding = if encodes { end - start } else { Duration::ZERO };
        shared.pace.lock().add(end, raw.len() as u64, encoding, Duration::ZERO);
        encoded
    }

    /// Does what waits for the receiver, and measures how long it waits.
    pub fn wait<T>(&self, send: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let sent = send();
        let end = Instant::now();
        self.encoding.shared.pace.lock().add(end, 0, Duration::ZERO, end - start);
        sent
    }
}

/// Decides whether encoding is worth its time.
#[derive(Debug)]
struct Pace {
    encodes: bool,
    /// Since the last decision.
    since: Instant,
    bytes: u64,
    encoding: Duration,
    waiting: Duration,
    /// Seconds in which a byte is encoded, as last measured.
    cost: f64,
    /// While the other way is tried: seconds a byte before.
    before: Option<f64>,
    /// Windows until the next trial.
    rest: u32,
    /// Windows to rest after the next trial that brings nothing.
    pause: u32,
}

impl Pace {
    fn new(now: Instant) -> Self {
        let none = Duration::ZERO;
        Self { encodes: true, since: now, bytes: 0, encoding: none, waiting: none, cost: 0.0, before: None, rest: 0, pause: 1 }
    }

    /// Adds what a thread did until now.
    fn add(&mut self, now: Instant, bytes: u64, encoding: Duration, waiting: Duration) {
        if self.bytes == 0 && self.encoding.is_zero() && self.waiting.is_zero() {
            // The time before a window is not the link's: before the first one the client asks
            // which blobs the registry lacks.
            let began = now.checked_sub(encoding + waiting).unwrap_or(now);
            self.since = self.since.max(began);
        }
        self.bytes += bytes;
        self.encoding += encoding;
        self.waiting += waiting;
        if self.bytes >= WINDOW {
            self.decide(now);
            (self.since, self.bytes) = (now, 0);
            (self.encoding, self.waiting) = (Duration::ZERO, Duration::ZERO);
        }
    }

    fn decide(&mut self, now: Instant) {
        let a_byte = |time: Duration| time.as_secs_f64() / self.bytes as f64;
        let (took, waited) = (a_byte(now.saturating_duration_since(self.since)), a_byte(self.waiting));
        if self.encodes {
            self.cost = a_byte(self.encoding);
        }
        match self.before.take() {
            Some(before) if took <= FASTER * before => (self.rest, self.pause) = (1, 1),
            Some(_) => {
                self.encodes = !self.encodes;
                (self.rest, self.pause) = (self.pause, (2 * self.pause).min(LONGEST_PAUSE));
            }
            None if self.rest > 0 => self.rest -= 1,
            None if self.encodes == (waited < self.cost) => {
                self.before = Some(took);
                self.encodes = !self.encodes;
            }
            None => return,
        }
        let (encodes, trial) = (self.encodes, self.before.is_some());
        tracing::debug!(encodes, trial, took, waited, cost = self.cost, "encoding, in seconds a byte");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link that takes bytes at this rate, and threads that encode at that one, in bytes a
    /// second, to so much of the bytes. Four threads work at once.
    struct Link {
        now: Instant,
        link: f64,
        encoder: f64,
        ratio: f64,
    }

    impl Link {
        const THREADS: f64 = 4.0;

        fn new(link: f64, encoder: f64) -> Self {
            Self { now: Instant::now(), link, encoder, ratio: 0.7 }
        }

        /// Sends a window. Returns whether it was encoded.
        fn window(&mut self, pace: &mut Pace) -> bool {
            let encodes = pace.encodes;
            let bytes = WINDOW as f64;
            // Reading is not free either.
            let read = bytes / 8e9;
            let encoding = if encodes { bytes / self.encoder } else { 0.0 };
            let sending = if encodes { self.ratio } else { 1.0 } * bytes / self.link;
            let took = sending.max((read + encoding) / Self::THREADS);
            let waiting = took * Self::THREADS - read - encoding;
            pace.add(self.now, 1, Duration::ZERO, Duration::ZERO);
            self.now += Duration::from_secs_f64(took);
            let [encoding, waiting] = [encoding, waiting].map(|seconds| Duration::from_secs_f64(seconds.max(0.0)));
            pace.add(self.now, WINDOW - 1, encoding, waiting);
            encodes
        }

        /// The share of windows that were encoded.
        fn encoded(&mut self, pace: &mut Pace, windows: u32) -> f64 {
            (0..windows).filter(|_| self.window(pace)).count() as f64 / f64::from(windows)
        }
    }

    fn pace(link: &Link) -> Pace {
        Pace::new(link.now)
    }

    #[test]
    fn on_a_slow_link_everything_is_encoded() {
        for rate in [1e6, 1e8, 1e9] {
            let mut link = Link::new(rate, 4e9);
            let mut pace = pace(&link);
            assert_eq!(link.encoded(&mut pace, 200), 1.0, "{rate}");
        }
    }

    #[test]
    fn on_a_link_that_is_faster_than_the_encoder_nearly_everything_goes_raw() {
        let mut link = Link::new(20e9, 0.5e9);
        let mut pace = pace(&link);
        assert!(link.window(&mut pace), "nothing is known at the start");
        assert_eq!(link.encoded(&mut pace, 200), 0.0);
    }

    #[test]
    fn where_the_encoder_keeps_up_just_so_trials_become_rare() {
        // Encoding costs more than waiting, and raw would still be slower.
        let mut link = Link::new(2.9e9, 1.0e9);
        let mut pace = pace(&link);
        let first = link.encoded(&mut pace, 32);
        assert!((0.6..1.0).contains(&first), "{first}");
        let later = link.encoded(&mut pace, 1000);
        assert!((0.97..1.0).contains(&later), "{later}");
    }

    #[test]
    fn the_time_before_the_first_blob_does_not_count() {
        // Encoding costs more than waiting, and raw would still be slower. If the time before the
        // encoded window counted, the raw one would seem faster.
        let mut link = Link::new(2.9e9, 1.0e9);
        let mut pace = pace(&link);
        link.now += Duration::from_secs(60);
        assert_eq!([0; 3].map(|_| link.window(&mut pace)), [true, false, true]);
    }

    #[test]
    fn only_what_stays_raw_for_speed_is_counted() {
        let encoding = Encoding::new(Compression::Hot, Codecs::ALL);
        encoding.shared.pace.lock().encodes = false;
        let mut encoder = encoding.encoder();
        let raw: Vec<u8> = (0..4096_u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) | 0x0101_0101).to_le_bytes()).collect();
        assert!(encoder.encode(&raw, Some(Dtype::Bf16)).is_none());
        assert_eq!(encoding.left_raw(), raw.len() as u64);
        // Zeros are left out in any case.
        assert!(encoder.encode(&vec![0; 1 << 20], Some(Dtype::Bf16)).is_some());
        // Nothing encodes these.
        assert!(encoder.encode(&raw, Some(Dtype::F32)).is_none());
        assert_eq!(encoding.left_raw(), raw.len() as u64);
        // A further try measures with the first, and counts for itself.
        let again = encoding.with_own_count();
        assert!(again.encoder().encode(&raw, Some(Dtype::Bf16)).is_none());
        assert_eq!((again.left_raw(), encoding.left_raw()), (raw.len() as u64, raw.len() as u64));
    }

    #[test]
    fn a_link_that_becomes_slow_is_noticed_and_one_that_becomes_fast_too() {
        let mut link = Link::new(20e9, 0.5e9);
        let mut pace = pace(&link);
        link.encoded(&mut pace, 20);
        link.link = 0.1e9;
        link.encoded(&mut pace, 4);
        assert_eq!(link.encoded(&mut pace, 100), 1.0);
        link.link = 20e9;
        link.encoded(&mut pace, 4);
        assert_eq!(link.encoded(&mut pace, 100), 0.0);
    }

    #[test]
    fn noise_does_not_switch_back_and_forth() {
        // Both ways take the same time; a tenth is needed to change.
        let mut link = Link { ratio: 1.0, ..Link::new(1.2e9, 0.4e9) };
        let mut pace = pace(&link);
        link.encoded(&mut pace, 300);
        let (mut switches, mut last) = (0, pace.encodes);
        for window in 0..300 {
            link.link = if window % 2 == 0 { 1.17e9 } else { 1.23e9 };
            link.window(&mut pace);
            switches += u32::from(pace.encodes != last);
            last = pace.encodes;
        }
        assert!(switches <= 16, "{switches}");
    }
}
