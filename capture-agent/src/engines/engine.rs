//! An engine: its members together.

use super::allocation::Allocation;
use super::hold::{self, Hold};
use super::layout::Group;
use super::pause::Pause;
use super::table;
use super::view::{Taken, View};
use crate::copies::Fills;
use crate::error::{Error, Result, few};
use pfr_schema::engine::{Allocate, Oracle, OracleRequest, Sequence, SequenceInfo, ToEngine, Verb};
use pfr_schema::shards::{self, Shards};
use pfr_schema::{Digest, ErrorCode};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// An engine. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Engine(Arc<View>);

impl Engine {
    pub(super) fn new(view: View) -> Self {
        Self(Arc::new(view))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.shared.name
    }

    /// Its deployment.
    #[must_use]
    pub fn deployment(&self) -> &BTreeMap<String, Value> {
        &self.0.shared.deployment
    }

    /// Digest of the deployment.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.0.shared.fingerprint
    }

    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.0.shared.world
    }

    /// The groups of one rank, by name.
    #[must_use]
    pub fn groups(&self, rank: u32) -> &[Group] {
        self.0.groups(rank)
    }

    /// Keys of its deployment that say only how ranks share the state.
    #[must_use]
    pub fn parallel(&self) -> &[String] {
        self.0.parallel()
    }

    /// How its ranks share the state of a sequence; none if it does not say. Of a replicated group
    /// only rank 0 is in a snapshot.
    #[must_use]
    pub fn shards(&self) -> Option<Shards> {
        if self.parallel().is_empty() {
            return None;
        }
        let of_rank = |rank| {
            self.groups(rank).iter().filter(move |group| rank == 0 || !group.layout.replicated).map(move |group| group.layout.shards(rank))
        };
        let groups = (0..self.world()).flat_map(of_rank).collect();
        Some(Shards { schema: shards::SCHEMA.into(), parallel: self.parallel().to_vec(), groups })
    }

    /// Whether it serves a verb.
    #[must_use]
    pub fn serves(&self, verb: Verb) -> bool {
        self.0.server(verb).is_some()
    }

    /// Takes the engine for one capture or restore. Other captures and restores are refused until
    /// the guard is dropped.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn take(&self, with: &str) -> Result<Taken> {
        self.0.shared.take(with)
    }

    /// Waits in line for the engine, and takes it.
    ///
    /// # Errors
    /// [`Error::Busy`] at the deadline.
    pub(crate) async fn wait(&self, with: &str, deadline: Instant) -> Result<Taken> {
        self.0.shared.wait(with, deadline).await
    }

    /// Whether both are views of one engine: not all of its members have left in between.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.shared, &other.0.shared)
    }

    /// Pauses the engine until the guard is dropped or resumed.
    ///
    /// # Errors
    /// [`Error::NotServed`], [`Error::Lost`], [`Error::Refused`].
    pub async fn pause(&self) -> Result<Pause> {
        Pause::begin(Arc::clone(&self.0)).await
    }

    /// The sequences that can be held now.
    ///
    /// # Errors
    /// [`Error::NotServed`], [`Error::Lost`], [`Error::Refused`].
    pub async fn sequences(&self) -> Result<Vec<SequenceInfo>> {
        hold::list(&self.0).await
    }

    /// State of a sequence at rest while the engine runs; of the only one if none is named. Checked
    /// as [`Pause::sequence`]. `save` is the ticket of the save that it is for.
    ///
    /// # Errors
    /// [`Error::SequenceUnknown`], [`Error::SequenceAmbiguous`], [`Error::NotServed`],
    /// [`Error::Lost`], [`Error::Refused`], [`Error::Protocol`].
    pub async fn hold(&self, sequence: Option<&str>, save: Option<&str>) -> Result<(Sequence, Hold)> {
        let engine = || self.name().to_owned();
        let unknown = |known| Error::SequenceUnknown { engine: engine(), sequence: sequence.unwrap_or_default().into(), known };
        let name = match sequence {
            Some(name) => name.to_owned(),
            None => match &self.sequences().await?[..] {
                [only] => only.id.clone(),
                [] => return Err(unknown("none".into())),
                several => return Err(Error::SequenceAmbiguous { engine: engine(), known: names(several) }),
            },
        };
        match Hold::take(&self.0, &name, save).await {
            Err(Error::Refused { failure, .. }) if failure.code == ErrorCode::SequenceUnknown => {
                Err(unknown(names(&self.sequences().await?)))
            }
            taken => taken,
        }
    }

    /// Logits of the next step; `None` if the engine does not serve them or the step will not run.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Refused`], [`Error::Protocol`] for logits of another step, or
    /// unsorted ones.
    pub async fn oracle(&self, sequence: &str, boundary: u64, top: u32) -> Result<Option<Oracle>> {
        let Some(member) = self.0.server(Verb::Oracle) else { return Ok(None) };
        let call = ToEngine::Oracle(OracleRequest { sequence: sequence.into(), boundary, top });
        let oracle: Oracle = member.call_within(self.0.shared.timeout, call).await?;
        if oracle.top.is_empty() {
            return Ok(None);
        }
        table::check_oracle(&oracle, boundary, top).map_err(|reason| member.broke(reason))?;
        Ok(Some(oracle))
    }

    /// Allocates blocks for a sequence to be restored. They are discarded if the allocation is
    /// dropped before [`Allocation::activate`].
    ///
    /// # Errors
    /// [`Error::NotServed`], [`Error::Lost`], [`Error::Refused`], [`Error::Protocol`] for blocks
    /// that are not there.
    pub async fn allocate(&self, what: Allocate) -> Result<Allocation> {
        Allocation::take(Arc::clone(&self.0), what).await
    }

    /// The snapshot that a sequence was last captured as or restored from.
    #[must_use]
    pub fn parent(&self, sequence: &str) -> Option<Digest> {
        self.0.shared.parent(sequence)
    }

    /// Remembers the snapshot of a sequence.
    pub fn set_parent(&self, sequence: &str, snapshot: Digest) {
        self.0.shared.set_parent(sequence, snapshot);
    }

    /// The sequence goes on from no snapshot.
    pub(crate) fn forget_parent(&self, sequence: &str) {
        self.0.shared.forget_parent(sequence);
    }

    /// Checks blocks by column that the engine has given for a restored sequence of `boundary`
    /// tokens: as [`Allocation::blocks`].
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn check_blocks(&self, boundary: u64, blocks: &BTreeMap<String, Vec<u32>>) -> Result<()> {
        let protocol = |reason| Error::Protocol { engine: self.name().into(), reason };
        self.0.check_blocks(boundary, blocks).map_err(protocol)
    }

    /// Checks a sequence that the engine describes: as [`Pause::sequence`].
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn check_sequence(&self, sequence: &Sequence) -> Result<()> {
        self.0.check_sequence(sequence)
    }

    /// Fills of its blocks.
    pub(crate) fn fills(&self) -> &Fills {
        &self.0.shared.fills
    }

    /// Tells all members that serve a verb, and waits for their answers, each at most `timeout`.
    /// A member that does not answer is only logged.
    pub(crate) async fn tell(&self, verb: Verb, call: ToEngine, timeout: std::time::Duration) {
        let told = self.0.servers(verb).map(|member| {
            let call = call.clone();
            async move {
                let name = call.name();
                if let Err(error) = member.call_within::<Value>(timeout, call).await {
                    tracing::debug!(engine = self.name(), member = member.name, call = name, %error, "engine was not told");
                }
            }
        });
        futures::future::join_all(told).await;
    }

    /// Counts a snapshot.
    pub fn count_snapshot(&self) {
        self.0.shared.count_snapshot();
    }

    /// Counts a restore.
    pub fn count_restore(&self) {
        self.0.shared.count_restore();
    }
}

fn names(sequences: &[SequenceInfo]) -> String {
    few(sequences.iter().map(|sequence| sequence.id.as_str()))
}
