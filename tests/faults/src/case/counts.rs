//! What a history did, and how one that failed is told.

/// Counts of one history, or of many.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Counts {
    /// Operations begun.
    pub rounds: u64,
    /// Operations acknowledged.
    pub acknowledged: u64,
    /// Operations killed at a step.
    pub cut: u64,
    /// Replicas killed.
    pub crashes: u64,
    /// Power losses.
    pub power_losses: u64,
    /// Databases lost and rebuilt.
    pub rebuilds: u64,
    /// Bits flipped, found and healed.
    pub flipped: u64,
    /// Collections that ran to their end.
    pub collections: u64,
    /// Calls that were made to fail.
    pub faults: u64,
    /// Events that a reader of their log found.
    pub events: u64,
    /// Snapshots that retention policies deleted.
    pub expired: u64,
    /// Snapshots at the end.
    pub snapshots: u64,
    /// Bytes compared with what was pushed.
    pub compared_bytes: u64,
    /// The longest time, in milliseconds, in which no operation could go on.
    pub longest_wait_ms: u64,
}

impl Counts {
    /// Adds the counts of another history.
    pub fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.acknowledged += other.acknowledged;
        self.cut += other.cut;
        self.crashes += other.crashes;
        self.power_losses += other.power_losses;
        self.rebuilds += other.rebuilds;
        self.flipped += other.flipped;
        self.collections += other.collections;
        self.faults += other.faults;
        self.events += other.events;
        self.expired += other.expired;
        self.snapshots += other.snapshots;
        self.compared_bytes += other.compared_bytes;
        self.longest_wait_ms = self.longest_wait_ms.max(other.longest_wait_ms);
    }
}

/// A violation, and how to repeat it.
#[derive(Clone, Debug)]
pub struct Counterexample {
    /// The seed.
    pub seed: u64,
    /// Number of waves until the violation.
    pub waves: u64,
    /// What was violated.
    pub what: String,
    /// Every operation until the violation.
    pub log: Vec<String>,
}

impl std::fmt::Display for Counterexample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}, wave {}: {}", self.seed, self.waves, self.what)?;
        self.log.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}
