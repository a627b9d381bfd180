//! Blobs of a repository: read, by ranges too, and taken out of it.

use super::{Answer, CONTENT_DIGEST, digest_value, keep_inert, value};
use crate::auth::{Access, Delete, Pull};
use crate::http::conditions::{etag, not_modified};
use crate::http::path::Path;
use crate::http::sending::OneByOne;
use crate::metrics::BYTES_SENT;
use crate::problem::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use pfr_schema::{Digest, Kind};
use pfr_store::Error;
use std::ops::Range;

pub(crate) async fn get(
    Access { to: repository, domain, .. }: Access<Pull>,
    Path(digest): Path<Digest>,
    method: Method,
    headers: HeaderMap,
) -> Answer<Response> {
    let size = domain.store.blob(&repository, &digest).await?;
    let unknown = Error::BlobUnknown { digest, kind: Kind::Blob };
    let size = match size {
        // A client asks so before it uploads, and an upload heals the blob.
        Some(_) if method == Method::HEAD && domain.store.is_damaged(&digest).await? => return Err(unknown.into()),
        size => size.ok_or(unknown)?,
    };
    let named = [
        (CONTENT_DIGEST, digest_value(&digest)),
        (header::ETAG, etag(&digest)),
        (header::ACCEPT_RANGES, HeaderValue::from_static("bytes")),
    ];
    if not_modified(&headers, &digest) {
        return Ok((StatusCode::NOT_MODIFIED, named).into_response());
    }
    let wanted = match headers.get(header::RANGE).and_then(|value| value.to_str().ok()) {
        Some(text) if method == Method::GET => part(text, size),
        _ => Part::All,
    };
    let (status, range) = match wanted {
        Part::All => (StatusCode::OK, 0..size),
        Part::Some(range) => (StatusCode::PARTIAL_CONTENT, range),
        Part::None => {
            let failure = ApiError::invalid(format!("the blob has {size} bytes, and none of them is in this range"));
            let mut response = failure.with_status(StatusCode::RANGE_NOT_SATISFIABLE).into_response();
            response.headers_mut().insert(header::CONTENT_RANGE, value(&format!("bytes */{size}")));
            return Ok(response);
        }
    };
    let length = range.end - range.start;
    let body = if method == Method::GET {
        let mut pieces = domain.store.raw(&digest, range.clone()).await?;
        // Once the head is sent, an error can only cut the stream.
        let first = pieces.try_next().await?;
        let sent = metrics::counter!(BYTES_SENT);
        let pieces = stream::iter(first.map(Ok)).chain(pieces).inspect_ok(move |bytes| sent.increment(bytes.len() as u64));
        Body::from_stream(OneByOne::new(pieces))
    } else {
        Body::empty()
    };
    let mut response = (status, named, body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    keep_inert(headers);
    if status == StatusCode::PARTIAL_CONTENT {
        headers.insert(header::CONTENT_RANGE, value(&format!("bytes {}-{}/{size}", range.start, range.end - 1)));
    }
    Ok(response)
}

pub(crate) async fn delete(Access { to: repository, domain, trail, .. }: Access<Delete>, Path(digest): Path<Digest>) -> Answer<StatusCode> {
    domain.store.audited(trail.change(202, None)).delete_blob(&repository, &digest).await?;
    Ok(StatusCode::ACCEPTED)
}

/// What a range asks for.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    All,
    Some(Range<u64>),
    None,
}

/// The part of `size` bytes that the header `Range` asks for. Several ranges, and words that are no
/// range, ask for all of it: RFC 9110, section 14.2.
fn part(text: &str, size: u64) -> Part {
    let Some((from, to)) = text.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-')) else { return Part::All };
    let range = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) if from <= to => from..to.saturating_add(1).min(size),
        (Ok(_), Ok(_)) => 0..0,
        (Ok(from), Err(_)) if to.is_empty() => from..size,
        (Err(_), Ok(last)) if from.is_empty() => size.saturating_sub(last)..size,
        _ => return Part::All,
    };
    if range.start < range.end { Part::Some(range) } else { Part::None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_blob() {
        for (text, expected) in [
            ("bytes=0-9", Part::Some(0..10)),
            ("bytes=5-", Part::Some(5..100)),
            ("bytes=-7", Part::Some(93..100)),
            ("bytes=-700", Part::Some(0..100)),
            ("bytes=90-500", Part::Some(90..100)),
            ("bytes=100-200", Part::None),
            ("bytes=9-0", Part::None),
            ("bytes=-0", Part::None),
            ("bytes=1-2,4-5", Part::All),
            ("bytes=x-y", Part::All),
            ("lines=1-2", Part::All),
        ] {
            assert_eq!(part(text, 100), expected, "{text}");
        }
        assert_eq!(part("bytes=0-0", 0), Part::None);
    }
}
