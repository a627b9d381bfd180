//! The sequences of a serving engine: computed tokens, the one chosen and not yet computed, and the
//! order of steps.

use crate::cache::SeqId;
use crate::compute::{Core, check};
use crate::error::EngineError;
use crate::sample::Sampler;
use pfr_schema::Digest;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Generation that was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) left: u64,
    pub(super) done: u64,
    pub(super) delay: Duration,
    pub(super) due: Instant,
}

/// One sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    /// Computed tokens, then those chosen.
    pub(super) tokens: Vec<u32>,
    /// Allocated for a restore and not yet proven: it does not run.
    pub(super) waiting: bool,
    pub(super) salt: String,
    pub(super) adapter: Option<String>,
    /// The last step: which token it computed, and its logits.
    last: Option<(u64, Arc<[f32]>)>,
    /// T at the last pause.
    paused_at: Option<u64>,
    /// The step after that pause, with its logits: the agent that captured the sequence may ask for
    /// them at any later time.
    resumed: Option<(u64, Arc<[f32]>)>,
    pub(super) job: Option<Job>,
}

impl Sequence {
    /// A sequence that is to be restored.
    pub(super) fn to_restore(tokens: Vec<u32>, salt: String, adapter: Option<String>) -> Self {
        Self { tokens, salt, adapter, waiting: true, ..Self::default() }
    }

    /// The logits of the step that computed token `boundary`, if they are still known.
    pub(super) fn scores(&self, boundary: u64) -> Option<Arc<[f32]>> {
        let kept = [&self.last, &self.resumed].into_iter().flatten();
        kept.filter(|(at, _)| *at == boundary).map(|(_, logits)| Arc::clone(logits)).next()
    }
}

/// What a step has brought.
pub(super) struct Step {
    pub(super) boundary: u64,
    pub(super) token: u32,
    pub(super) logits: Arc<[f32]>,
}

/// A core and its sequences.
pub(super) struct Sequences {
    pub(super) core: Box<dyn Core>,
    pub(super) all: BTreeMap<SeqId, Sequence>,
    /// The sequence that made the last step.
    cursor: SeqId,
}

impl Sequences {
    pub(super) fn new(core: Box<dyn Core>) -> Self {
        Self { core, all: BTreeMap::new(), cursor: SeqId(0) }
    }

    /// Finds a sequence by its public name.
    pub(super) fn find(&self, name: &str) -> Option<SeqId> {
        name.strip_prefix("seq-")
            .and_then(|n| n.parse().ok())
            .map(SeqId)
            .filter(|seq| self.all.contains_key(seq) && seq.to_string() == name)
    }

    /// T.
    pub(super) fn boundary(&self, seq: SeqId) -> u64 {
        self.core.blocks().tokens(seq).unwrap_or(0) as u64
    }

    pub(super) fn open(&mut self, prompt: Vec<u32>, salt: String, adapter: Option<String>) -> Result<SeqId, EngineError> {
        check(&*self.core, 0, &prompt)?;
        let seq = self.core.blocks_mut().create()?;
        if prompt.is_empty() {
            self.core.blocks_mut().free(seq)?;
            return Err(EngineError::EmptySequence(seq.0));
        }
        let logits: Arc<[f32]> = match self.core.compute(seq, &prompt) {
            Ok(logits) => logits.into(),
            Err(error) => {
                self.core.blocks_mut().free(seq)?;
                return Err(error);
            }
        };
        let last = Some((prompt.len() as u64 - 1, Arc::clone(&logits)));
        let mut tokens = prompt;
        tokens.push(Sampler::Greedy.choose(&logits));
        self.all.insert(seq, Sequence { tokens, salt, adapter, last, ..Sequence::default() });
        Ok(seq)
    }

    /// Computes the chosen token and the given ones, and chooses the next.
    pub(super) fn append(&mut self, seq: SeqId, more: Vec<u32>) -> Result<(), EngineError> {
        let at = self.core.blocks().tokens(seq)?;
        let sequence = self.all.get_mut(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        let given = [&sequence.tokens[at..], &more].concat();
        check(&*self.core, at, &given)?;
        let computed = self.core.compute(seq, &given);
        sequence.tokens.extend(more);
        match computed {
            Ok(logits) => {
                let logits: Arc<[f32]> = logits.into();
                sequence.last = Some((sequence.tokens.len() as u64 - 1, Arc::clone(&logits)));
                sequence.tokens.push(Sampler::Greedy.choose(&logits));
                Ok(())
            }
            Err(error) => {
                // The computed tokens stay, and one that is not computed.
                sequence.tokens.truncate(self.core.blocks().tokens(seq)? + 1);
                Err(error)
            }
        }
    }

    /// Room for a sequence whose blocks another fills.
    pub(super) fn allocate(&mut self, boundary: u64, sequence: Sequence) -> Result<SeqId, EngineError> {
        check(&*self.core, 0, &sequence.tokens)?;
        let boundary = usize::try_from(boundary).unwrap_or(usize::MAX);
        let seq = self.core.blocks_mut().allocate(boundary)?;
        self.all.insert(seq, sequence);
        Ok(seq)
    }

    pub(super) fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        let sequence = self.all.get(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        let copy = Sequence { job: None, ..sequence.clone() };
        let fork = self.core.blocks_mut().fork(seq)?;
        self.all.insert(fork, copy);
        Ok(fork)
    }

    pub(super) fn free(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.all.remove(&seq);
        self.core.blocks_mut().free(seq)
    }

    /// Computes the token at the boundary and chooses the next one, unless it was chosen before.
    pub(super) fn step(&mut self, seq: SeqId) -> Result<Step, EngineError> {
        let at = self.core.blocks().tokens(seq)?;
        let sequence = self.all.get_mut(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        let token = *sequence.tokens.get(at).ok_or(EngineError::EmptySequence(seq.0))?;
        let logits: Arc<[f32]> = self.core.compute(seq, &[token])?.into();
        if sequence.tokens.len() == at + 1 {
            sequence.tokens.push(Sampler::Greedy.choose(&logits));
        }
        sequence.last = Some((at as u64, Arc::clone(&logits)));
        if sequence.paused_at == Some(at as u64) {
            sequence.resumed.clone_from(&sequence.last);
        }
        Ok(Step { boundary: at as u64 + 1, token: sequence.tokens[at + 1], logits })
    }

    /// Records the boundary of every sequence.
    pub(super) fn paused(&mut self) {
        for (seq, sequence) in &mut self.all {
            sequence.paused_at = self.core.blocks().tokens(*seq).ok().map(|tokens| tokens as u64);
        }
    }

    /// The logits of the next step, without keeping its result.
    pub(super) fn foresee(&mut self, seq: SeqId) -> Result<Arc<[f32]>, EngineError> {
        let fork = self.fork(seq)?;
        let step = self.step(fork).map(|step| step.logits);
        self.free(fork)?;
        step
    }

    /// The sequence of the next step: each that is due once, then again from the first.
    pub(super) fn next(&self, now: Instant) -> Option<SeqId> {
        let due = |(seq, sequence): (&SeqId, &Sequence)| sequence.job.filter(|job| job.due <= now).map(|_| *seq);
        let after = (std::ops::Bound::Excluded(self.cursor), std::ops::Bound::Unbounded);
        self.all.range(after).find_map(due).or_else(|| self.all.iter().find_map(due))
    }

    /// When the next step is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.all.values().filter_map(|sequence| sequence.job.map(|job| job.due)).min()
    }

    pub(super) fn stepped(&mut self, seq: SeqId) {
        self.cursor = seq;
    }
}

/// SHA-256 of the little-endian bits of logits.
pub(super) fn digest(logits: &[f32]) -> String {
    Digest::sha256(&logits.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).to_string()
}

/// The highest logits, ties by lower token.
pub(super) fn top(logits: &[f32], count: u32) -> Vec<(u32, u32)> {
    let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    // +0 and −0 are equal logits.
    order.sort_unstable_by(|a, b| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0)));
    order.into_iter().take(count as usize).map(|(token, score)| (token, score.to_bits())).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn equal_scores_stand_by_token() {
        let tokens = |logits: &[f32]| super::top(logits, 3).into_iter().map(|(token, _)| token).collect::<Vec<_>>();
        assert_eq!(tokens(&[-0.0, 0.0, -1.0, 0.0]), [0, 1, 3]);
        assert_eq!(tokens(&[1.0, 3.0, 3.0, 2.0]), [1, 2, 3]);
    }
}
