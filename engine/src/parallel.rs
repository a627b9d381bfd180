//! Splitting work over threads.
//!
//! Threads only ever get whole units of output that no other thread touches, so results do not
//! depend on how many there are or on which gets what.

use std::sync::{Mutex, PoisonError};

/// Runs of units per thread: enough for a thread that starts late to leave its share to the others.
const RUNS: usize = 4;

/// Cuts `out` into runs of whole `unit`s and calls `work(first unit, run)` on each, on up to
/// `threads` threads of which one is the caller's. `out.len()` must be a multiple of `unit`.
pub fn split<T: Send>(threads: usize, out: &mut [T], unit: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let units = out.len().checked_div(unit).unwrap_or(0);
    let threads = threads.min(units);
    if threads <= 1 {
        return work(0, out);
    }
    let run = (units / (threads * RUNS)).max(1);
    let queue = Mutex::new(out.chunks_mut(run * unit).enumerate());
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        while let Some((i, part)) = take() {
            work(i * run, part);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(worker);
        }
        worker();
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_unit_is_done_once() {
        for units in 0..30 {
            for threads in 0..7 {
                let mut out = vec![0; units * 3];
                super::split(threads, &mut out, 3, |first, run| {
                    for (i, x) in run.iter_mut().enumerate() {
                        *x += first * 3 + i + 1;
                    }
                });
                assert!(out.iter().enumerate().all(|(i, x)| *x == i + 1));
            }
        }
    }
}
