//! `Idempotency-Key`: a change of tags or snapshots takes place once, however often the client
//! repeats the request.

use crate::problem::ApiError;
use axum::http::{HeaderMap, HeaderName};
use pfr_schema::Digest;
use pfr_store::{Once, PushId};
use serde::Serialize;

/// The header, as in `draft-ietf-httpapi-idempotency-key-header`.
pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The key that identifies repetitions of this request, if the client sent one. `request` is
/// everything that it asked, unresolved.
pub(crate) fn once(headers: &HeaderMap, request: &impl Serialize) -> Result<Option<Once>, ApiError> {
    let mut values = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let key = value.to_str().ok().filter(|_| values.next().is_none()).map(|text| text.trim().trim_matches('"'));
    let key: uuid::Uuid = key
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| ApiError::invalid("expected one UUID in Idempotency-Key, made for this request and used again only to repeat it"))?;
    let request = serde_json::to_vec(request).map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(Some(Once { session: PushId(key.to_string()), request: Digest::sha256(&request) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(values: &[&str]) -> Result<Option<Once>, ApiError> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(IDEMPOTENCY_KEY, value.parse().unwrap());
        }
        once(&headers, &("put_tag", "t"))
    }

    #[test]
    fn a_key_is_one_uuid_with_or_without_quotes() {
        let key = "0190aaaa-0000-7000-8000-000000000001";
        assert!(keyed(&[]).unwrap().is_none());
        for text in [key.to_owned(), format!("\"{key}\""), key.to_uppercase()] {
            assert_eq!(keyed(&[&text]).unwrap().unwrap().session.0, key);
        }
        for wrong in [&["again"][..], &[""], &[key, key]] {
            assert!(keyed(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn another_request_under_the_same_key_is_told_apart() {
        let mut headers = HeaderMap::new();
        headers.insert(IDEMPOTENCY_KEY, "0190aaaa-0000-7000-8000-000000000001".parse().unwrap());
        let digest = |tag: &str| once(&headers, &("put_tag", tag)).unwrap().unwrap().request;
        assert_eq!(digest("a"), digest("a"));
        assert_ne!(digest("a"), digest("b"));
    }
}
