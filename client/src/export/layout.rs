//! The face that all places of a layout have in common.

use super::spool::{Spool, Written};
use crate::error::{Error, Result};
use bytes::Bytes;
use futures::TryStreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use pfr_schema::export::Entry;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, FormatError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The blobs and manifests of an OCI image layout, wherever they are.
pub(crate) trait Layout: Send + Sync + fmt::Debug {
    /// Its name in messages.
    fn name(&self) -> &str;

    /// The manifests that it lists; none if nothing was exported there yet.
    fn entries(&self) -> BoxFuture<'_, Result<Vec<Entry>>>;

    /// The bytes of a manifest of at most so many bytes. Not verified.
    fn manifest<'a>(&'a self, entry: &'a Entry, most: u64) -> BoxFuture<'a, Result<Bytes>>;

    /// A range of a blob. The stream fails if it has fewer bytes or more. Nothing is verified.
    fn read(&self, digest: Digest, range: Range<u64>) -> BoxStream<'static, Result<Bytes>>;

    /// A file for a blob whose digest is not known yet.
    fn spool(&self) -> Result<Spool>;

    /// Stores a blob, durably; returns whether it was not there.
    fn put(&self, blob: Written) -> BoxFuture<'_, Result<bool>>;

    /// Lists a manifest whose blobs are all stored. Readers see it from now on, or from
    /// [`Self::finish`] on.
    fn publish<'a>(&'a self, manifest: &'a Document, entry: Entry) -> BoxFuture<'a, Result<()>>;

    /// Ends the export.
    fn finish(&self) -> BoxFuture<'_, Result<()>>;
}

/// An error of a place.
pub(crate) fn failed(place: &str, code: ErrorCode, reason: impl Into<String>) -> Error {
    Error::Layout { place: place.to_owned(), code, reason: reason.into() }
}

/// An error of a document of a place.
pub(crate) fn malformed(place: &str, what: &str) -> impl FnOnce(FormatError) -> Error + use<> {
    let (place, what) = (place.to_owned(), what.to_owned());
    move |source| Error::Layout { place, code: source.code(), reason: format!("{what}: {source}") }
}

/// A range of a blob in memory.
pub(crate) async fn bytes_of(layout: &Arc<dyn Layout>, digest: Digest, range: Range<u64>) -> Result<Bytes> {
    let pieces: Vec<Bytes> = layout.read(digest, range).try_collect().await?;
    Ok(match &pieces[..] {
        [one] => one.clone(),
        many => many.concat().into(),
    })
}
