//! Large downloads from the storage itself: the registry returns the location of frames, and signs
//! URLs for them.

use crate::domains::Domain;
use crate::metrics::BYTES_REDIRECTED;
use axum::http::{HeaderMap, header};
use pfr_schema::codec::Codecs;
use pfr_schema::media_type::FRAME_LOCATIONS;
use pfr_schema::{Digest, api};
use pfr_store::Result;
use pfr_store::storage::Storage;
use std::time::Duration;

/// Average length below which a range is not worth its own request. The registry, which is near the
/// storage, then sends the frames.
const MIN_AVERAGE: u64 = 128 << 10;
/// Ranges in one answer, at most. Each takes a URL of a few hundred bytes.
const MAX_RANGES: usize = 4096;

/// The storage that clients are redirected to.
pub struct Redirects {
    storage: Storage,
    expires: Duration,
}

impl Redirects {
    pub(crate) fn new(storage: Storage, expires: Duration) -> Self {
        Self { storage, expires }
    }

    /// The locations of the frames of `digests` for a client that reads these codecs; `None` if
    /// this registry should rather send them.
    pub(crate) async fn locations(&self, domain: &Domain, digests: &[Digest], codecs: Codecs) -> Result<Option<api::FrameLocations>> {
        let Some(ranges) = domain.store.ranges(digests, codecs).await? else { return Ok(None) };
        let bytes: u64 = ranges.iter().map(|range| range.length).sum();
        if ranges.is_empty() || ranges.len() > MAX_RANGES || bytes / (ranges.len() as u64) < MIN_AVERAGE {
            return Ok(None);
        }
        let mut extents: Vec<api::FrameExtent> = Vec::with_capacity(ranges.len());
        let mut last: Option<(String, String)> = None;
        for range in ranges {
            let url = match &last {
                Some((path, url)) if *path == range.path => url.clone(),
                _ => self.storage.signed_url(&domain.path_of(&range.path), self.expires).await?,
            };
            last = Some((range.path, url.clone()));
            extents.push(api::FrameExtent { url, offset: range.offset, length: range.length, digests: range.digests });
        }
        metrics::counter!(BYTES_REDIRECTED).increment(bytes);
        Ok(Some(api::FrameLocations { expires_seconds: self.expires.as_secs(), extents }))
    }
}

/// Whether the client accepts locations.
pub(crate) fn accepted(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(header::ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let mut kinds = accepts.flat_map(|value| value.split(',')).map(|kind| kind.split(';').next().unwrap_or_default().trim());
    kinds.any(|kind| kind.eq_ignore_ascii_case(FRAME_LOCATIONS))
}
