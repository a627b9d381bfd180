//! Which states a power cut may leave: at every sync, which of the operations before it reached the
//! disk.
//!
//! An operation that no sync has made durable may have reached the disk or not, whatever happened
//! to the others, and a write may have reached it in part. Every state that is possible between two
//! syncs is also possible right before the second. So the states right before each sync, and at the
//! end, are all states. There are too many to open each, so a [`Bound`] says which are.

use crate::disk::{Disk, Tear};
use crate::trace::{Action, Node, Trace};
use pfr_schema::Digest;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// Bytes that a disk writes completely or not at all.
const SECTOR: usize = 512;

/// Which states are enumerated.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// With so many pending operations or fewer, every subset of them.
    pub subsets: usize,
    /// With more: so many beginnings, ends, single operations that are lost or are all that is
    /// kept, evenly spread; all that there are if fewer.
    pub positions: usize,
    /// Whether this includes operations that were pending at the moment before. Otherwise these are
    /// lost or kept together.
    pub old: bool,
    /// Of these beginnings, each without each single operation.
    pub pairs: bool,
    /// Number of additional random subsets.
    pub random: usize,
    /// Distinct states to open at most, evenly spread.
    pub most: usize,
}

impl Bound {
    /// For a normal run.
    pub const NORMAL: Self = Self { most: 36, ..Self::COARSE };
    /// For a normal run that is about one kind of work.
    pub const SHORT: Self = Self { most: 8, ..Self::NORMAL };
    /// What a planted bug must be found with.
    pub const COARSE: Self = Self { subsets: 2, positions: 2, old: false, pairs: false, random: 0, most: 600 };
    /// For a long run of what takes long to open.
    pub const MEDIUM: Self = Self { subsets: 3, positions: 4, old: false, pairs: false, random: 0, most: 90 };
    /// For a long run.
    pub const LONG: Self = Self { subsets: 8, positions: 24, old: true, pairs: true, random: 20, most: usize::MAX };
}

/// A moment right before a sync, or at the end.
#[derive(Debug)]
pub struct Moment {
    /// Operations before it.
    pub at: usize,
    /// What is durable.
    base: Disk,
    /// Operations that may have reached the disk.
    pending: Vec<usize>,
    /// How many of them were pending at the moment before.
    old: usize,
}

/// A state: which pending operations of a moment reached the disk, some of them in part.
#[derive(Clone, Debug)]
pub struct State {
    moment: usize,
    kept: Kept,
}

type Kept = Vec<(usize, Option<Tear>)>;

/// The states of a trace, each once.
#[derive(Debug)]
pub struct States<'a> {
    trace: &'a Trace,
    moments: Vec<Moment>,
    /// Distinct states, each at its last possible moment, when the most was acknowledged.
    pub states: Vec<State>,
    /// Number of states before equal ones were merged.
    pub enumerated: usize,
}

impl<'a> States<'a> {
    /// Enumerates the states. Two states are equal if the files that `counts` selects are equal.
    #[must_use]
    pub fn of(trace: &'a Trace, bound: Bound, seed: u64, counts: fn(&Path) -> bool) -> Self {
        let moments = moments(trace);
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let found: Vec<(usize, usize, Digest, Kept)> = std::thread::scope(|scope| {
            let work = |worker: usize| {
                let mut found = Vec::new();
                for (number, moment) in moments.iter().enumerate().skip(worker).step_by(workers) {
                    let mut random = StdRng::seed_from_u64(seed ^ number as u64);
                    for (order, kept) in moment.subsets(trace, bound, &mut random).into_iter().enumerate() {
                        found.push((number, order, moment.disk(trace, &kept).digest(&trace.mapped, counts), kept));
                    }
                }
                found
            };
            let running: Vec<_> = (0..workers).map(|worker| scope.spawn(move || work(worker))).collect();
            running.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        let enumerated = found.len();
        let mut distinct: HashMap<Digest, (usize, usize, Kept)> = HashMap::new();
        for (moment, order, digest, kept) in found {
            let last = distinct.entry(digest).or_insert_with(|| (moment, order, kept.clone()));
            if moment > last.0 || (moment == last.0 && order < last.1) {
                *last = (moment, order, kept);
            }
        }
        let mut ordered: Vec<(usize, usize, Kept)> = distinct.into_values().collect();
        ordered.sort_by_key(|(moment, order, _)| (*moment, *order));
        let opened = spread(ordered.len(), bound.most);
        let mut states: Vec<Option<State>> = ordered.into_iter().map(|(moment, _, kept)| Some(State { moment, kept })).collect();
        let states = opened.into_iter().filter_map(|at| states[at].take()).collect();
        Self { trace, moments, states, enumerated }
    }

    /// The trace.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        self.trace
    }

    /// How many operations the program had made.
    #[must_use]
    pub fn at(&self, state: &State) -> usize {
        self.moments[state.moment].at
    }

    /// The content of the disk.
    #[must_use]
    pub fn disk(&self, state: &State) -> Disk {
        self.moments[state.moment].disk(self.trace, &state.kept)
    }

    /// Describes a state: when the power failed, and what did not reach the disk.
    #[must_use]
    pub fn words(&self, state: &State) -> String {
        let moment = &self.moments[state.moment];
        let kept: BTreeMap<usize, Option<Tear>> = state.kept.iter().copied().collect();
        let words = |at: &usize| match kept.get(at) {
            None => Some(format!("  lost {}", self.trace.words(*at))),
            Some(Some(tear)) => Some(format!("  torn {tear:?} {}", self.trace.words(*at))),
            Some(None) => None,
        };
        let lost: Vec<String> = moment.pending.iter().filter_map(words).collect();
        let shown = lost.len().min(12);
        let more = if lost.len() > shown { format!("\n  and {} more", lost.len() - shown) } else { String::new() };
        let when = if moment.at < self.trace.ops.len() { self.trace.words(moment.at) } else { "the end".into() };
        format!(
            "a power cut before {when}, {} of {} unsynced operations reached the disk\n{}{more}",
            kept.len(),
            moment.pending.len(),
            lost[..shown].join("\n")
        )
    }
}

/// The moments at which some operation becomes durable, and the end.
fn moments(trace: &Trace) -> Vec<Moment> {
    let (mut base, mut pending, mut moments): (Disk, Vec<usize>, Vec<Moment>) = (trace.before.clone(), Vec::new(), Vec::new());
    let moment = |at: usize, base: &Disk, pending: &[usize], moments: &[Moment]| {
        let before = moments.last().map_or(0, |moment| moment.at);
        Moment { at, base: base.clone(), pending: pending.to_vec(), old: pending.partition_point(|at| *at < before) }
    };
    base.settle();
    for (at, op) in trace.ops.iter().enumerate() {
        let Action::Sync(synced) = op.action else {
            // The content of a mapped file does not matter, so it counts as on disk.
            match op.action.target().is_some_and(|node| trace.mapped.contains(&node)) {
                true => base.apply(&op.action),
                false => pending.push(at),
            }
            continue;
        };
        let mut durable: BTreeSet<usize> = pending.iter().copied().filter(|at| trace.ops[*at].action.is_covered_by(synced)).collect();
        if durable.is_empty() {
            continue;
        }
        moments.push(moment(at, &base, &pending, &moments));
        // A rename is on disk completely or not at all.
        let whole: Vec<usize> = durable.iter().filter_map(|at| needs(trace, *at)).collect();
        durable.extend(whole.into_iter().filter(|at| pending.contains(at)));
        durable.iter().for_each(|at| base.apply(&trace.ops[*at].action));
        base.settle();
        pending.retain(|at| !durable.contains(at));
    }
    moments.push(moment(trace.ops.len(), &base, &pending, &moments));
    moments
}

fn needs(trace: &Trace, at: usize) -> Option<usize> {
    match trace.ops[at].action {
        Action::Name { needs, .. } => needs,
        _ => None,
    }
}

impl Moment {
    fn disk(&self, trace: &Trace, kept: &Kept) -> Disk {
        let mut disk = self.base.clone();
        for (at, tear) in kept {
            let action = &trace.ops[*at].action;
            match tear {
                Some(tear) => disk.apply_torn(action, *tear),
                None => disk.apply(action),
            }
        }
        disk
    }

    /// The sets of operations that may have reached the disk, most interesting first.
    fn subsets(&self, trace: &Trace, bound: Bound, random: &mut StdRng) -> Vec<Kept> {
        let all = &self.pending;
        let count = all.len();
        let keep = |which: &dyn Fn(usize) -> bool| -> Kept { (0..count).filter(|i| which(*i)).map(|i| (all[i], None)).collect() };
        let mut found = vec![keep(&|_| true)];
        if count == 0 {
            return found;
        }
        found.push(keep(&|_| false));
        let first = if bound.old { 0 } else { self.old };
        let positions: Vec<usize> = spread(count - first, bound.positions).into_iter().map(|at| first + at).collect();
        found.push(keep(&|i| i >= first));
        if count - first <= bound.subsets {
            for set in 0..1_usize << (count - first) {
                found.push(keep(&|i| i < first || set & (1 << (i - first)) != 0));
                found.push(keep(&|i| i >= first && set & (1 << (i - first)) != 0));
            }
        } else {
            for at in &positions {
                found.extend([keep(&|i| i < *at), keep(&|i| i >= *at), keep(&|i| i != *at), keep(&|i| i == *at)]);
                if bound.pairs {
                    found.extend(positions.iter().filter(|drop| *drop < at).map(|drop| keep(&|i| i <= *at && i != *drop)));
                }
            }
        }
        self.by_target(trace, &all[first..], &mut found);
        for at in positions {
            for tear in tears(&trace.ops[all[at]].action) {
                let torn = (all[at], Some(tear));
                let mut before = keep(&|i| i < at);
                before.push(torn);
                let mut others = keep(&|i| i != at);
                others.push(torn);
                others.sort_by_key(|(at, _)| *at);
                found.extend([before, others, vec![torn]]);
            }
        }
        found.extend((0..bound.random).map(|_| {
            let share = random.random_range(0.1..0.9);
            let set: Vec<bool> = (0..count).map(|_| random.random_bool(share)).collect();
            keep(&|i| set[i])
        }));
        found.iter_mut().for_each(|kept| self.repair(trace, kept));
        found
    }

    /// All of one file or directory is lost, or is all that is kept; or a file has its size and not
    /// its bytes.
    fn by_target(&self, trace: &Trace, looked_at: &[usize], found: &mut Vec<Kept>) {
        let target = |at: usize| trace.ops[at].action.target();
        let targets: BTreeSet<Node> = looked_at.iter().filter_map(|at| target(*at)).collect();
        let of = |which: &dyn Fn(Option<Node>) -> bool| -> Kept {
            self.pending.iter().filter(|at| which(target(**at))).map(|at| (*at, None)).collect()
        };
        for node in targets {
            found.extend([of(&|other| other != Some(node)), of(&|other| other == Some(node))]);
            let mut sizes = of(&|_| true);
            sizes.iter_mut().filter(|(at, _)| target(*at) == Some(node)).for_each(|(_, tear)| *tear = Some(Tear::Size));
            found.push(sizes);
        }
    }

    /// Takes out what cannot be on disk without what is not.
    fn repair(&self, trace: &Trace, kept: &mut Kept) {
        let there: BTreeSet<usize> = kept.iter().map(|(at, _)| *at).collect();
        kept.retain(|(at, _)| needs(trace, *at).is_none_or(|needed| there.contains(&needed) || !self.pending.contains(&needed)));
    }
}

/// At most `most` numbers below `count`, evenly spread, the first and the last among them.
fn spread(count: usize, most: usize) -> Vec<usize> {
    if count <= most || most < 2 {
        return (0..count).collect();
    }
    (0..most).map(|i| i * (count - 1) / (most - 1)).collect()
}

/// In which ways a write may be torn: at the first sector boundary, in the middle, with only its
/// end there, with only its size.
fn tears(action: &Action) -> Vec<Tear> {
    let Action::Write { offset, bytes, .. } = action else { return Vec::new() };
    let first = SECTOR - (*offset as usize % SECTOR);
    if bytes.len() <= first {
        return vec![Tear::Size];
    }
    let middle = first + (bytes.len() - first) / 2 / SECTOR * SECTOR;
    let mut tears = vec![Tear::First(first), Tear::Last(first), Tear::Size];
    if middle > first {
        tears.push(Tear::First(middle));
    }
    tears
}

#[cfg(test)]
mod tests;
