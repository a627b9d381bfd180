//! How far a push or pull has come: atomics that it raises and that a progress bar polls.

use crate::plan::Totals;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The current step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing yet.
    Starting,
    /// Reading and checking the source.
    Reading,
    /// Asking which blobs the destination lacks.
    Negotiating,
    /// Sending frames.
    Sending,
    /// Receiving frames.
    Receiving,
    /// Making received blobs durable, or writing the documents of a directory.
    Writing,
    /// Making the snapshot visible.
    Committing,
    /// Done.
    Done,
}

impl Phase {
    const ALL: [Self; 8] =
        [Self::Starting, Self::Reading, Self::Negotiating, Self::Sending, Self::Receiving, Self::Writing, Self::Committing, Self::Done];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Reading => "reading",
            Self::Negotiating => "negotiating",
            Self::Sending => "sending",
            Self::Receiving => "receiving",
            Self::Writing => "writing",
            Self::Committing => "committing",
            Self::Done => "done",
        })
    }
}

#[derive(Debug, Default)]
struct Counters {
    phase: AtomicU8,
    bytes_total: AtomicU64,
    bytes_done: AtomicU64,
    bytes_deduplicated: AtomicU64,
    blobs_total: AtomicU64,
    blobs_done: AtomicU64,
}

/// How far a push or pull has come. Cheap to clone; all clones are one. Bytes are raw bytes.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident, $set:ident;)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(&self) -> u64 {
            self.0.$name.load(Ordering::Relaxed)
        }
        pub(crate) fn $set(&self, bytes: u64) {
            self.0.$name.fetch_add(bytes, Ordering::Relaxed);
        })*
    };
}

impl Progress {
    /// The current step.
    #[must_use]
    pub fn phase(&self) -> Phase {
        let number = usize::from(self.0.phase.load(Ordering::Relaxed));
        Phase::ALL.get(number).copied().unwrap_or(Phase::Starting)
    }

    /// Sets the size of the snapshot.
    pub(crate) fn begin(&self, totals: &Totals) {
        self.add_bytes_total(totals.bytes);
        self.add_blobs_total(totals.blobs);
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.0.phase.store(phase as u8, Ordering::Relaxed);
    }

    counters! {
        /// Raw bytes that the snapshot reaches; 0 until known.
        bytes_total, add_bytes_total;
        /// Raw bytes moved.
        bytes_done, add_bytes_done;
        /// Raw bytes that the destination had already.
        bytes_deduplicated, add_bytes_deduplicated;
        /// Blobs that the snapshot reaches, nodes included; 0 until known.
        blobs_total, add_blobs_total;
        /// Blobs moved.
        blobs_done, add_blobs_done;
    }

    /// Subtracts the count of a request that is repeated.
    pub(crate) fn undo(&self, bytes: u64, blobs: u64) {
        self.0.bytes_done.fetch_sub(bytes, Ordering::Relaxed);
        self.0.blobs_done.fetch_sub(blobs, Ordering::Relaxed);
    }
}
