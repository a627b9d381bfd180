//! The OCI Distribution API below `/v2`, for programs that know container registries.
//!
//! ```text
//! request ─▶ address: the name of the repository becomes one segment ─▶ router ─▶ Access ─▶ handler ─▶ Store
//! failure ─▶ http::request ─▶ error: the same failure, in the words of this API
//! ```
//!
//! It is another way to the same store: images are in the repositories that snapshots are in, under
//! the same tags, with the same references, and a snapshot is an artifact that can be read. The
//! specification describes the routes, so the OpenAPI document does not have them. Decision 53 says
//! what differs from `/v1` and why.

mod address;
mod blobs;
mod error;
mod lists;
mod manifests;
mod uploads;

pub(crate) use address::{Address, Folded, fold};
pub(crate) use blobs::{delete as delete_blob, get as get_blob};
pub(crate) use error::{is_oci, response_to};
pub(crate) use lists::{catalog, ping, referrers, tags};
pub(crate) use manifests::{delete as delete_manifest, get as get_manifest, put as put_manifest};
pub(crate) use uploads::{append, begin, cancel, finish, status};

use crate::problem::ApiError;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use pfr_schema::Digest;

/// The result of a handler.
type Answer<T> = Result<T, ApiError>;

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// A header with a digest, an address or a number: text without anything that a header forbids.
fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Keeps a browser from running what a client pushed: its manifest may say that it is HTML, and a
/// script in it would act here with the token that the browser keeps.
fn keep_inert(headers: &mut HeaderMap) {
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox; default-src 'none'"));
}

fn digest_value(digest: &Digest) -> HeaderValue {
    value(&digest.to_string())
}
