//! Proof that a snapshot is complete and undamaged: reads and hashes every blob that its manifest
//! reaches.

use super::ROWS;
use super::values::{Caller, Values, Work};
use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{Health, ObjectId, ObjectRow};
use crate::verify::{Incoming, verified_frames};
use bytes::Bytes;
use futures::StreamExt as _;
use pfr_schema::{Container, Digest, Kind, api};
use std::collections::HashSet;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// How far [`Store::verify`] has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Blobs read and hashed.
    pub blobs: u64,
    /// Raw bytes hashed.
    pub bytes: u64,
    /// Bytes of the frames that these are stored in.
    pub stored_bytes: u64,
    /// Raw bytes to hash in all.
    pub total_bytes: u64,
}

impl Store {
    /// Verifies a manifest: reads and hashes every blob that it reaches, follows the references in
    /// the bytes, not only in metadata, and computes the value hash of every checkpoint tensor
    /// whose layout is not opaque.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first blob that is missing, or whose bytes do not match its
    /// digest or kind; [`Error::WrongValue`] with the tensor whose value hash differs. A damaged
    /// blob is quarantined, and an undamaged blob in quarantine is released.
    ///
    /// [`Error::Unprovable`] for checkpoints whose values have many more bytes than their payloads:
    /// their value hashes are not computed. If the caller drops the future, each thread ends with
    /// the few MiB that it is at.
    #[boxed]
    pub async fn verify(&self, manifest: &Digest, progress: &mut (dyn FnMut(VerifyProgress) + Send)) -> Result<api::Verified> {
        self.verify_in(manifest, None, progress).await
    }

    /// As [`Store::verify`], with a permit that limits how many verifications run at once. The
    /// permit is released when the work has ended, which may be a moment after the caller dropped
    /// the future.
    ///
    /// # Errors
    /// As [`Store::verify`].
    #[boxed]
    pub async fn verify_in(
        &self,
        manifest: &Digest,
        place: Option<OwnedSemaphorePermit>,
        progress: &mut (dyn FnMut(VerifyProgress) + Send),
    ) -> Result<api::Verified> {
        let caller = Caller(Work::new(place));
        let verified = self.prove(manifest, &caller.0, progress).await;
        if let Err(Error::Corrupt { digest, .. }) = &verified {
            // Quarantine only a blob that is bad a second time: a wrong reference to it or a
            // temporary fault of the storage is no damage.
            match self.examine(digest).await {
                Ok(Some(damage)) => tracing::error!(%digest, reason = damage.reason, "a stored blob is damaged"),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, %digest, "quarantining a damaged blob failed"),
            }
        }
        verified
    }

    async fn prove(&self, manifest: &Digest, work: &Work, progress: &mut (dyn FnMut(VerifyProgress) + Send)) -> Result<api::Verified> {
        let rows = self.reach(manifest).await?;
        self.look_again(&rows).await?;
        let reached: HashSet<Digest> = rows.iter().map(|row| row.digest).collect();
        let mut values = self.values(&rows, work).await?;
        let mut done = VerifyProgress { total_bytes: rows.iter().map(|row| row.size).sum(), ..VerifyProgress::default() };
        for batch in rows.chunks(ROWS) {
            self.verify_batch(batch.iter().map(|row| row.digest).collect(), &reached, &mut values, &mut done, progress).await?;
        }
        let Values { computed: values_computed, attested: values_attested, .. } = values;
        let VerifyProgress { blobs, bytes, stored_bytes, .. } = done;
        Ok(api::Verified { digest: *manifest, blobs, bytes, stored_bytes, values_computed, values_attested })
    }

    /// Reads blobs in quarantine again, and releases those that are good.
    async fn look_again(&self, rows: &[ObjectRow]) -> Result<()> {
        let mut looked = false;
        for batch in rows.chunks(ROWS) {
            let digests: Vec<Digest> = batch.iter().map(|row| row.digest).collect();
            for (digest, location) in digests.iter().zip(self.metadata.locate(digests.clone()).await?) {
                if location.is_some_and(|location| location.health == Health::Damaged) {
                    self.examine(digest).await?;
                    looked = true;
                }
            }
        }
        if looked { self.reassess().await.map(|_| ()) } else { Ok(()) }
    }

    /// The tensors of the checkpoints among `rows`.
    async fn values(&self, rows: &[ObjectRow], work: &Work) -> Result<Values> {
        let mut values = Values::new(work.clone());
        for row in rows.iter().filter(|row| row.kind == Kind::Checkpoint) {
            let container = self.container(&row.digest, Kind::Checkpoint).await.map_err(|error| match error {
                Error::Format(source) => Error::Corrupt { digest: row.digest, reason: source.to_string() },
                other => other,
            })?;
            if let Container::Checkpoint(checkpoint) = container {
                values.add(row.digest, checkpoint)?;
            }
        }
        Ok(values)
    }

    async fn verify_batch(
        &self,
        digests: Vec<Digest>,
        reached: &HashSet<Digest>,
        values: &mut Values,
        done: &mut VerifyProgress,
        progress: &mut (dyn FnMut(VerifyProgress) + Send),
    ) -> Result<()> {
        let frames = self.frames(digests).await?;
        let mut frames = Box::pin(verified_frames(frames, self.options.limits.clone(), Arc::clone(&self.large_documents)));
        let (mut large, mut passing) = (None, None);
        while let Some(item) = frames.next().await {
            let item = item.map_err(|error| match error {
                Error::Frame { digest, source, .. } => Error::Corrupt { digest, reason: source.to_string() },
                other => other,
            })?;
            let header = match item {
                Incoming::Begin(header) => {
                    passing = values.begin(&header, &self.large_documents).await?;
                    large = Some(header);
                    continue;
                }
                Incoming::Piece(piece) => {
                    if let Some(before) = passing.take() {
                        passing = Some(before.piece(piece).await?);
                    }
                    continue;
                }
                Incoming::Finish { .. } => {
                    if let Some(passed) = passing.take() {
                        values.computed += passed.finish().await?;
                    }
                    large.take().ok_or_else(|| Error::Internal("an end without a beginning".into()))?
                }
                Incoming::Whole(whole) => {
                    let header = whole.header;
                    let corrupt = |reason: String| Error::Corrupt { digest: header.digest, reason };
                    if header.kind.is_container() {
                        let raw = whole.raw().map_err(|e| corrupt(e.to_string()))?;
                        let container = Container::parse(header.kind, &raw, &self.options.limits).map_err(|e| corrupt(e.to_string()))?;
                        let children = container.map(|c| c.children()).unwrap_or_default();
                        if let Some(lost) = children.iter().find(|child| !reached.contains(&child.digest)) {
                            return Err(corrupt(format!("it lists {}, which the snapshot does not reach in the metadata", lost.digest)));
                        }
                    }
                    let raw = || whole.raw().map(|raw| Bytes::from(raw.into_owned())).map_err(|e| corrupt(e.to_string()));
                    values.check(&header.digest, raw).await?;
                    header
                }
            };
            done.blobs += 1;
            done.bytes += header.raw_len;
            done.stored_bytes += header.frame_len();
            progress(*done);
        }
        Ok(())
    }

    /// Everything a manifest reaches, in the order of storage: reads of packs are then sequential.
    async fn reach(&self, manifest: &Digest) -> Result<Vec<ObjectRow>> {
        let root = self.row(manifest, Kind::Manifest).await?;
        let id = root.id;
        let mut seen: HashSet<ObjectId> = HashSet::from([id]);
        let (mut level, mut all) = (vec![root], Vec::new());
        while !level.is_empty() {
            let ids: Vec<ObjectId> = level.iter().flat_map(|row| row.children.iter().copied()).filter(|id| seen.insert(*id)).collect();
            all.append(&mut level);
            let expected = ids.len();
            level = self.rows(ids).await?;
            if level.len() != expected {
                // Another client may have deleted the snapshot since, and a collection its blobs.
                if self.row(manifest, Kind::Manifest).await?.id != id {
                    return Err(Error::BlobUnknown { digest: *manifest, kind: Kind::Manifest });
                }
                return Err(Error::Corrupt {
                    digest: *manifest,
                    reason: format!("{} of the objects it reaches are not there", expected - level.len()),
                });
            }
        }
        all.sort_unstable_by_key(|row| row.id);
        Ok(all)
    }
}
