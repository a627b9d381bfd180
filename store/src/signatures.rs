//! Signatures of snapshots: images that refer to them, in the form of cosign.
//!
//! ```text
//! add     signatures there + new ones ─▶ places ─▶ payloads, configuration: blobs ─▶ one manifest, subject: the snapshot
//!                                      ─▶ the tag sha256-<hex>.sig moves to it, from where it was ─▶ the manifest before goes
//! read    manifests that refer to the snapshot, and the one at that tag ─▶ their layers ─▶ payloads
//! a tag   policy? ─▶ refused by the transaction ─▶ signatures read and checked here ─▶ the same transaction again, with what was found
//! ```
//!
//! A store does not know whether a signature is good: a reader has the public key. Only signing
//! policies have keys here, and they are asked when a tag is put.

mod keys;
mod places;

pub use keys::{PrivateKey, signer};

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{ManifestName, ManifestRow, NameChange, Page, SignatureManifest, Signed, Signing, TagMove};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use pfr_schema::api::{NewSignature, Signature, TagState, snapshot_etag};
use pfr_schema::signature::{self, Layer, MOST, PAYLOAD_MAX, PublicKey};
use pfr_schema::{Digest, FormatError, Image, RepositoryName, Tag};
use places::{Signed as SignedLayer, Signer};
use std::collections::HashSet;

/// How often another writer may be faster at the tag of a snapshot's signatures.
const TRIES: usize = 16;

impl Store {
    /// The signatures of a snapshot or an image, at most [`MOST`]: those at its tag first, then
    /// those of other manifests, oldest first. None is checked. A manifest or a payload that is
    /// damaged or malformed is left out.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn signatures(&self, repository: &RepositoryName, subject: &Digest) -> Result<Vec<Signature>> {
        let (mut found, mut seen): (Vec<Signature>, HashSet<(Digest, String)>) = (Vec::new(), HashSet::new());
        let mut rows = self.metadata.signature_manifests(repository.clone(), *subject, MOST).await?;
        // Those that refer to the snapshot may be many, and older: they must not hide what is here.
        if let Some(tag) = signature::tag_of(subject)
            && let Some(at_tag) = self.metadata.manifest(repository.clone(), ManifestName::Tag(tag)).await?
        {
            rows.retain(|row| row.id != at_tag.id);
            rows.insert(0, at_tag);
        }
        for row in rows {
            for layer in self.signature_layers(&row.digest).await? {
                let Some(text) = layer.signature() else { continue };
                if !seen.insert((layer.digest, text.to_owned())) {
                    continue;
                }
                // Those that turn out to be none count, too: each costs a look at a blob.
                if seen.len() > MOST {
                    return Ok(found);
                }
                if let Some(new) = self.signature(repository, &layer).await? {
                    found.push(new.into());
                }
            }
        }
        Ok(found)
    }

    async fn signature_layers(&self, manifest: &Digest) -> Result<Vec<Layer>> {
        let Some(bytes) = readable(self.read(manifest).await)? else { return Ok(Vec::new()) };
        Ok(signature::layers(&bytes, &self.options.limits).unwrap_or_default())
    }

    /// Whether a manifest refers to this snapshot, or to nothing as those that cosign pushes. One
    /// of another snapshot is not replaced: that snapshot would lose its signatures.
    async fn is_about(&self, manifest: &Digest, snapshot: &Digest) -> Result<bool> {
        let Some(bytes) = readable(self.read(manifest).await)? else { return Ok(false) };
        let image = Image::describe(&bytes, &self.options.limits);
        Ok(image.is_ok_and(|image| image.subject.is_none_or(|subject| subject == *snapshot)))
    }

    async fn signature(&self, repository: &RepositoryName, layer: &Layer) -> Result<Option<NewSignature>> {
        let Some(text) = layer.signature() else { return Ok(None) };
        // The manifest may be wrong about it.
        if self.blob(repository, &layer.digest).await?.is_none_or(|size| size > PAYLOAD_MAX) {
            return Ok(None);
        }
        let Some(bytes) = readable(self.read(&layer.digest).await)? else { return Ok(None) };
        let payload = String::from_utf8(bytes.to_vec()).ok();
        Ok(payload.map(|payload| NewSignature { payload, signature: text.to_owned() }))
    }

    /// All manifests with signatures of a repository, oldest first.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::Invalid`] for a cursor that is none.
    pub async fn signature_list(
        &self,
        repository: &RepositoryName,
        after: Option<String>,
        limit: usize,
    ) -> Result<Page<SignatureManifest>> {
        self.metadata.signature_list(repository.clone(), after, limit).await
    }

    /// Adds signatures to a snapshot; those that it has already are left out. Returns all that it
    /// has then. One by a key of a signing policy replaces the older one by the same key, and the
    /// oldest ones by keys of no policy if there is no place.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`]; [`Error::Format`] for one that is malformed, or for another
    /// snapshot; [`Error::Invalid`] for more than [`MOST`] in all.
    #[boxed]
    pub async fn add_signatures(&self, repository: &RepositoryName, snapshot: &Digest, new: &[NewSignature]) -> Result<Vec<Signature>> {
        for signature in new {
            signature.check(snapshot)?;
        }
        self.metadata.snapshot(repository.clone(), *snapshot).await?;
        let keys = self.policy_keys(repository).await?;
        let signers = signers(*snapshot, new.iter().cloned().map(Some).collect(), keys.clone()).await?;
        let mut tag = signature::tag_of(snapshot);
        for _ in 0..TRIES {
            let there = self.signatures(repository, snapshot).await?;
            let is_there = |new: &NewSignature| there.iter().any(|old| old.payload == new.payload && old.signature == new.signature);
            let mut fresh: Vec<SignedLayer> = Vec::new();
            for (signature, by) in new.iter().zip(&signers).filter(|(new, _)| !is_there(new)) {
                let layer = Layer::of(signature);
                if !fresh.iter().any(|one| one.layer == layer) {
                    fresh.push(SignedLayer { layer, by: *by });
                }
            }
            if fresh.is_empty() {
                // They may be there by a request that was cut before the journal had them.
                self.flush_journal().await?;
                return Ok(there);
            }
            let of_others = fresh.iter().filter(|one| one.by.is_none()).count();
            if of_others > 0 && there.len() + of_others > MOST {
                return Err(Error::Invalid(format!("a snapshot has at most {MOST} signatures; {snapshot} has {} already", there.len())));
            }
            let before = match &tag {
                Some(tag) => self.metadata.manifest(repository.clone(), ManifestName::Tag(tag.clone())).await?,
                None => None,
            };
            match self.put_signatures(repository, snapshot, (new, fresh), &keys, tag.as_ref(), before).await {
                Ok(()) => return self.signatures(repository, snapshot).await,
                // Another signature came first.
                Err(Error::TagMoved { .. }) => {}
                // Readers find them without it, too; cosign only if it is told to.
                Err(Error::TagImmutable { .. }) if tag.is_some() => tag = None,
                Err(error) => return Err(error),
            }
        }
        Err(Error::Overloaded("other clients sign the same snapshot again and again"))
    }

    /// The keys that signing policies name for a repository, each once. More than there are places
    /// are not looked at: each costs a check of every signature.
    async fn policy_keys(&self, repository: &RepositoryName) -> Result<Vec<PublicKey>> {
        let Signing { policies, .. } = self.metadata.signing().await?;
        let here = policies.policies.into_iter().filter(|policy| policy.repositories.matches(repository.as_str()));
        let mut keys: Vec<PublicKey> = Vec::new();
        for key in here.flat_map(|policy| policy.keys) {
            if keys.len() < MOST && !keys.contains(&key) {
                keys.push(key);
            }
        }
        Ok(keys)
    }

    /// These layers, each once, and the keys of policies that have made them.
    async fn signed(
        &self,
        repository: &RepositoryName,
        snapshot: &Digest,
        layers: Vec<Layer>,
        keys: &[PublicKey],
    ) -> Result<Vec<SignedLayer>> {
        let mut distinct: Vec<Layer> = Vec::with_capacity(layers.len());
        for layer in layers {
            if !distinct.contains(&layer) {
                distinct.push(layer);
            }
        }
        let mut found = Vec::with_capacity(distinct.len());
        for layer in &distinct {
            found.push(if keys.is_empty() { None } else { self.signature(repository, layer).await? });
        }
        let signers = signers(*snapshot, found, keys.to_vec()).await?;
        Ok(distinct.into_iter().zip(signers).map(|(layer, by)| SignedLayer { layer, by }).collect())
    }

    /// Stores a manifest with `fresh` and what the manifest at the tag has, in its stead.
    async fn put_signatures(
        &self,
        repository: &RepositoryName,
        snapshot: &Digest,
        (new, fresh): (&[NewSignature], Vec<SignedLayer>),
        keys: &[PublicKey],
        tag: Option<&Tag>,
        before: Option<ManifestRow>,
    ) -> Result<()> {
        let is_about = match &before {
            Some(before) => self.is_about(&before.digest, snapshot).await?,
            None => false,
        };
        let mut layers = match &before {
            Some(before) if is_about => self.signature_layers(&before.digest).await?,
            _ => Vec::new(),
        };
        let all = layers.len();
        layers.retain(|layer| layer.signature().is_some());
        // Anything else at that tag only loses the tag.
        let replaces = !layers.is_empty() && layers.len() == all;
        let there = self.signed(repository, snapshot, layers, keys).await?;
        // Readers refuse a manifest with more, and would find none of them.
        let Some(layers) = places::place(there, fresh) else {
            let place = tag.map(|tag| format!("the manifest at {tag}")).unwrap_or_default();
            return Err(Error::Invalid(format!("a snapshot has at most {MOST} signatures, and {place} has as many layers; delete it")));
        };
        let row = self.metadata.manifest(repository.clone(), ManifestName::Digest(*snapshot)).await?;
        let (manifest, config) = signature::manifest(*snapshot, row.map_or(0, |row| row.size), &layers);
        let blobs = new.iter().map(|signature| Bytes::copy_from_slice(signature.payload.as_bytes())).chain([Bytes::from(config)]);
        for blob in blobs {
            let (digest, size) = (Digest::sha256(&blob), blob.len() as u64);
            self.put_blob(repository, digest, size, stream::iter([Ok(blob)]).boxed()).await?;
        }
        let expected = Some(before.map_or(TagState::Absent, |before| TagState::At(before.digest)));
        let moves = tag.map(|tag| TagMove { tag: tag.clone(), expected }).into_iter().collect();
        let put = self.put_image_at(repository, manifest, None, moves).await?;
        if let Some(before) = before.filter(|before| replaces && before.digest != put) {
            // The new one has all of it. If this fails it stays, and says nothing twice.
            let etag = Some(snapshot_etag(&before.digest, &[]));
            let silent = Self { audit: None, ..self.clone() };
            if let Err(error) = silent.change_names(repository, NameChange::DeleteSnapshot { snapshot: before.digest, etag }, None).await {
                tracing::debug!(%error, %repository, manifest = %before.digest, "deleting a manifest of signatures that was replaced failed");
            }
        }
        Ok(())
    }

    /// Whether a change that was refused for want of a signature is to be made again, with what
    /// `signed` says then.
    pub(crate) async fn is_signed_after_all(&self, refused: Option<&Error>, signed: &mut Option<Signed>) -> Result<bool> {
        let Some(Error::SignatureRequired { repository, tag, digest, .. }) = refused else { return Ok(false) };
        let mut found = self.policies_satisfied(repository, digest).await?;
        if let Some(before) = signed.as_ref().filter(|before| before.version == found.version) {
            found.replaced.clone_from(&before.replaced);
        }
        if let Some(snapshot) = signature::signed_by(tag)
            && let Some(there) = self.metadata.manifest(repository.clone(), ManifestName::Tag(tag.clone())).await?
            && !found.replaced.contains(&there.digest)
            && self.keeps_signers(repository, &snapshot, &there.digest, digest).await?
        {
            found.replaced.push(there.digest);
        }
        // With the same policies the transaction says the same again, unless it knows more.
        let again = signed.as_ref() != Some(&found) && !(found.policies.is_empty() && found.replaced.is_empty());
        *signed = Some(found);
        Ok(again)
    }

    /// Whether a manifest has a signature by each key of a policy that signed in the one at the tag
    /// of a snapshot's signatures. One about another snapshot has none that counts, and could not
    /// be added to.
    #[boxed]
    async fn keeps_signers(&self, repository: &RepositoryName, snapshot: &Digest, there: &Digest, new: &Digest) -> Result<bool> {
        let keys = self.policy_keys(repository).await?;
        let before = self.signers_in(repository, snapshot, there, &keys).await?;
        if before.is_empty() {
            return Ok(true);
        }
        let after = self.signers_in(repository, snapshot, new, &keys).await?;
        Ok(before.iter().all(|key| after.contains(key)))
    }

    async fn signers_in(
        &self,
        repository: &RepositoryName,
        snapshot: &Digest,
        manifest: &Digest,
        keys: &[PublicKey],
    ) -> Result<Vec<PublicKey>> {
        if !self.is_about(manifest, snapshot).await? {
            return Ok(Vec::new());
        }
        let layers = self.signature_layers(manifest).await?;
        let signed = self.signed(repository, snapshot, layers, keys).await?;
        Ok(signed.iter().filter_map(|one| Some(one.by?.key)).collect())
    }

    /// The policies that hold now, and for which a manifest has a good signature.
    #[boxed]
    async fn policies_satisfied(&self, repository: &RepositoryName, digest: &Digest) -> Result<Signed> {
        let Signing { version, policies } = self.metadata.signing().await?;
        let signatures = self.signatures(repository, digest).await?;
        let (digest, repository) = (*digest, repository.clone());
        // A hundred signatures by a hundred keys of a hundred policies take long.
        let check = move || {
            let here = policies.policies.into_iter().filter(|policy| policy.repositories.matches(repository.as_str()));
            let satisfied = here.filter(|policy| signatures.iter().any(|one| signer(one, &digest, &policy.keys).is_some()));
            Signed { version, policies: satisfied.map(|policy| policy.name).collect(), replaced: Vec::new() }
        };
        pfr_service::task::spawn_blocking(check).await.map_err(Error::from)
    }
}

/// Which of these keys has made each of these signatures, if one has.
async fn signers(snapshot: Digest, signatures: Vec<Option<NewSignature>>, keys: Vec<PublicKey>) -> Result<Vec<Option<Signer>>> {
    let check = move || {
        let signer_of = |new: Option<NewSignature>| {
            let one = Signature::from(new?);
            signer(&one, &snapshot, &keys).map(|key| Signer { key: *key, at: one.signed_at.unwrap_or(0) })
        };
        signatures.into_iter().map(signer_of).collect()
    };
    pfr_service::task::spawn_blocking(check).await.map_err(Error::from)
}

/// A blob that can be read; none if it is gone, damaged or too large.
fn readable(read: Result<Bytes>) -> Result<Option<Bytes>> {
    match read {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Error::Corrupt { .. } | Error::BlobUnknown { .. } | Error::Format(FormatError::TooLarge { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}
