//! Images: OCI manifests and indexes, in the same repositories and under the same tags as
//! snapshots.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::live::LivePush;
use crate::metadata::{ManifestName, ManifestRow, NewImage, Page, TagMove};
use crate::store::document_frame;
use bytes::Bytes;
use pfr_schema::frame::end_mark;
use pfr_schema::{Digest, Document, FormatError, Image, Kind, RepositoryName, Tag};
use std::collections::HashSet;

impl Store {
    /// Stores a manifest or an index in `repository`, as it came, and points tags at it. `named` is
    /// the digest that it should have; without one it is named by SHA-256. Returns its digest.
    ///
    /// # Errors
    /// [`Error::Format`] if it is malformed, or is not what its digest says; [`Error::Missing`] if
    /// the repository lacks something that it lists; [`Error::Invalid`] for the manifest of a
    /// snapshot that the repository does not have.
    #[boxed]
    pub async fn put_image(&self, repository: &RepositoryName, bytes: Vec<u8>, named: Option<Digest>, tags: Vec<Tag>) -> Result<Digest> {
        let moves = tags.into_iter().map(|tag| TagMove { tag, expected: None }).collect();
        self.put_image_at(repository, bytes, named, moves).await
    }

    /// The same, and tags move only from where they should be.
    ///
    /// # Errors
    /// As [`Store::put_image`]; [`Error::TagMoved`].
    #[boxed]
    pub(crate) async fn put_image_at(
        &self,
        repository: &RepositoryName,
        bytes: Vec<u8>,
        named: Option<Digest>,
        moves: Vec<TagMove>,
    ) -> Result<Digest> {
        let image = Image::describe(&bytes, &self.options.limits)?;
        let digest = match named {
            Some(named) => {
                let found = Digest::of(named.algorithm(), &bytes);
                if found != named {
                    return Err(FormatError::DigestMismatch { expected: named.to_string(), found: found.to_string() }.into());
                }
                named
            }
            None => Digest::sha256(&bytes),
        };
        let known = self.metadata.manifest(repository.clone(), ManifestName::Digest(digest)).await?;
        let listed = image.children();
        let optional: Vec<Digest> = listed.iter().filter(|child| child.optional).map(|child| child.digest).collect();
        if known.is_none() && image.is_snapshot() {
            return Err(Error::Invalid(format!("{repository} has no snapshot {digest}; push it there with `pf push`")));
        }
        // Also one that is there: a blob or a manifest that it lists may have been deleted.
        let of = |kind: Kind| -> Vec<Digest> {
            listed.iter().filter(|child| !child.optional && child.kind == kind).map(|child| child.digest).collect()
        };
        let manifests = of(Kind::Image);
        self.must_list(repository, digest, of(Kind::Blob), manifests.clone()).await?;
        let session = self.open_push(repository).await?.id;
        let new = NewImage {
            manifest: digest,
            artifact_type: image.artifact_type,
            subject: image.subject,
            moves,
            optional,
            manifests,
            audit: self.audit_entry(),
            signed: None,
        };
        let is_whole = match known {
            // A damaged one is healed by its bytes.
            Some(_) => self.missing(&session, vec![(digest, Kind::Image)]).await.map(|missing| missing.is_empty()),
            None => Ok(false),
        };
        let stored = match is_whole {
            Ok(true) => Ok(()),
            Err(error) => Err(error),
            Ok(false) => {
                let document = Document { digest, kind: Kind::Image, bytes };
                let frames = [document_frame(&document), end_mark(1).into()].map(Ok::<Bytes, Error>);
                self.ingest(&session, futures::stream::iter(frames)).await.map(drop)
            }
        };
        let done = match stored {
            Ok(()) => self.journaled(self.put_in_session(&session, new).await).await,
            Err(error) => Err(error),
        };
        if done.is_err() {
            self.give_up(&session).await;
        }
        done.map(|_| digest)
    }

    async fn put_in_session(&self, session: &LivePush, new: NewImage) -> Result<bool> {
        let mut signed = None;
        loop {
            let done = self.metadata.put_image(session.id.clone(), NewImage { signed: signed.clone(), ..new.clone() }).await;
            if !self.is_signed_after_all(done.as_ref().err(), &mut signed).await? {
                return done;
            }
        }
    }

    /// Refuses a manifest that lists what its repository does not have: with one answer, whether or
    /// not another repository has it.
    async fn must_list(&self, repository: &RepositoryName, container: Digest, blobs: Vec<Digest>, manifests: Vec<Digest>) -> Result<()> {
        let absent = self.metadata.blobs_missing(repository.clone(), blobs, false).await?;
        let mut missing = match absent.is_empty() {
            true => absent,
            false => {
                self.link_manifests(repository).await?;
                self.metadata.blobs_missing(repository.clone(), absent, false).await?
            }
        };
        // The bytes of a manifest may be here as a blob, which cannot be pulled as a manifest.
        missing.extend(self.metadata.blobs_missing(repository.clone(), manifests, true).await?);
        let mut named = HashSet::new();
        missing.retain(|digest| named.insert(*digest));
        if missing.is_empty() { Ok(()) } else { Err(Error::Missing { container, missing }) }
    }

    /// A manifest of a repository, if it has it: that of an image or of a snapshot.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn find_manifest(&self, repository: &RepositoryName, name: ManifestName) -> Result<Option<ManifestRow>> {
        self.metadata.manifest(repository.clone(), name).await
    }

    /// A stored manifest of an image or a snapshot: its bytes, and what they say.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn read_image(&self, digest: &Digest) -> Result<(Bytes, Image)> {
        let bytes = self.read(digest).await?;
        let image = Image::describe(&bytes, &self.options.limits)?;
        Ok((bytes, image))
    }

    /// All tags of a repository by name: those of images and those of snapshots.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`].
    pub async fn all_tags(&self, repository: &RepositoryName, after: Option<String>, limit: usize) -> Result<Page<Tag>> {
        self.metadata.all_tags(repository.clone(), after, limit).await
    }

    /// Manifests of a repository that refer to `subject`, of one type or of any, after the row
    /// `after`. An index may have no type: an empty text asks for those.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn referrers(
        &self,
        repository: &RepositoryName,
        subject: Digest,
        artifact_type: Option<String>,
        after: i64,
        limit: usize,
    ) -> Result<Vec<ManifestRow>> {
        self.metadata.referrers(repository.clone(), subject, artifact_type, after, limit).await
    }
}
