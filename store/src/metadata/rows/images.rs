//! Images, the blobs of a repository, and unfinished uploads.

use super::{AuditEntry, Signed, TagMove};
use pfr_schema::{Digest, Tag};

/// An image to be put into a repository.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// The manifest or index, which is stored.
    pub manifest: Digest,
    /// What kind of artifact it is.
    pub artifact_type: Option<String>,
    /// What it refers to.
    pub subject: Option<Digest>,
    /// Tags to point at it.
    pub moves: Vec<TagMove>,
    /// Blobs that it lists and that the repository need not have.
    pub optional: Vec<Digest>,
    /// Manifests that it lists.
    pub manifests: Vec<Digest>,
    /// What the audit log will say of it, if anything.
    pub audit: Option<AuditEntry>,
    /// What is known of its signatures.
    pub signed: Option<Signed>,
}

/// How a manifest of a repository is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManifestName {
    /// By a tag.
    Tag(Tag),
    /// By its digest.
    Digest(Digest),
}

/// A manifest of a repository: of an image, or of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestRow {
    /// Its row id: the order of lists.
    pub id: i64,
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
}

/// A manifest of which it is not noted yet what it lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlinked {
    /// Its row id.
    pub id: i64,
    /// The digest of an image; none for a snapshot.
    pub image: Option<Digest>,
}

/// What a manifest puts into its repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Its row id.
    pub manifest: i64,
    /// Of the children that it holds, those that its repository has by it; none: all of them.
    pub needs: Option<Vec<Digest>>,
}

/// A part of an unfinished upload: a blob of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadPart {
    /// Where its first byte is in the upload.
    pub begin_at: u64,
    /// Its bytes.
    pub size: u64,
    /// Its digest.
    pub digest: Digest,
}
