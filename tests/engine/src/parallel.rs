//! Splitting work over threads.
//!
//! Threads only ever get whole units of output that no other thread touches, so results do not depend on
//! how many there are.

/// Cuts `out` into one run of whole `unit`s per thread and calls `work(first unit, run)` on each.
///
/// The caller's thread takes the first run. `out.len()` must be a multiple of `unit`.
pub fn split<T: Send>(threads: usize, out: &mut [T], unit: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let units = out.len().checked_div(unit).unwrap_or(0);
    let threads = threads.min(units);
    if threads <= 1 {
        return work(0, out);
    }
    std::thread::scope(|scope| {
        let work = &work;
        let (own, mut rest) = out.split_at_mut(units / threads * unit);
        let mut first = units / threads;
        for i in 1..threads {
            let end = (i + 1) * units / threads;
            let (run, after) = rest.split_at_mut((end - first) * unit);
            rest = after;
            let start = first;
            scope.spawn(move || work(start, run));
            first = end;
        }
        work(0, own);
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_unit_is_done_once() {
        for units in 0..9 {
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
