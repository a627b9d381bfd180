//! `If-Match` and `If-None-Match` on tags, which mean the same as `if_tag_is`, and `If-Match` on
//! snapshots.

use crate::problem::ApiError;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use pfr_schema::Digest;
use pfr_schema::api::TagState;

/// The state in which the client expects the tag that it changes, from the headers and from the
/// field `if_tag_is` of the body, if the body has this field.
pub(crate) fn expected(headers: &HeaderMap, in_body: Option<TagState>) -> Result<Option<TagState>, ApiError> {
    let at = one(headers, &header::IF_MATCH)?.map(|text| digest(&header::IF_MATCH, text).map(TagState::At)).transpose()?;
    let absent = match one(headers, &header::IF_NONE_MATCH)? {
        None => None,
        Some("*") => Some(TagState::Absent),
        Some(other) => return Err(ApiError::invalid(format!("expected If-None-Match: *, found {other:?}"))),
    };
    let given: Vec<TagState> = [at, absent, in_body].into_iter().flatten().collect();
    match given.split_first() {
        None => Ok(None),
        Some((first, rest)) if rest.iter().all(|state| state == first) => Ok(Some(*first)),
        Some(_) => Err(ApiError::invalid("If-Match, If-None-Match and if_tag_is contradict each other; give one of them")),
    }
}

/// The entity tag that a snapshot must have to be deleted.
pub(crate) fn expected_etag(headers: &HeaderMap) -> Result<Option<Digest>, ApiError> {
    // Without this check the header would have no effect, and a snapshot that the client wants to
    // keep would be deleted.
    if headers.contains_key(header::IF_NONE_MATCH) {
        return Err(ApiError::invalid("a snapshot is deleted with If-Match or without a condition, not with If-None-Match"));
    }
    one(headers, &header::IF_MATCH)?.map(|text| digest(&header::IF_MATCH, text)).transpose()
}

/// Whether `If-None-Match` contains the current digest of the tag, so that the client need not read
/// the tag again.
pub(crate) fn not_modified(headers: &HeaderMap, current: &Digest) -> bool {
    let current = etag(current);
    headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(',')).any(|given| {
        let given = given.trim();
        given == "*" || given.strip_prefix("W/").unwrap_or(given).as_bytes() == current.as_bytes()
    })
}

/// A digest as an entity tag.
pub(crate) fn etag(digest: &Digest) -> HeaderValue {
    // Hex and a colon in quotes: always a legal header value.
    HeaderValue::from_str(&format!("\"{digest}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let text = value.to_str().map_err(|_| ApiError::invalid(format!("{name} is not text")))?.trim();
    if values.next().is_some() || text.contains(',') {
        return Err(ApiError::invalid(format!("expected one value in {name}: a tag or snapshot is in one state")));
    }
    Ok(Some(text))
}

fn digest(name: &HeaderName, text: &str) -> Result<Digest, ApiError> {
    let quoted = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    quoted.and_then(|digest| digest.parse().ok()).ok_or_else(|| {
        let text: String = text.chars().take(160).collect();
        ApiError::invalid(format!("expected {name}: \"<digest>\", the ETag of the tag or snapshot, found {text}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap_or(HeaderValue::from_static("")))).collect()
    }

    #[test]
    fn headers_and_body_say_the_same_or_are_refused() {
        let digest = Digest::sha256(b"x");
        let quoted = format!("\"{digest}\"");
        let at = Some(TagState::At(digest));
        let by_header = headers(&[(header::IF_MATCH, &quoted)]);
        let cases = [
            (HeaderMap::new(), None, Some(None)),
            (HeaderMap::new(), at, Some(at)),
            (by_header.clone(), None, Some(at)),
            (by_header.clone(), at, Some(at)),
            (by_header, Some(TagState::Absent), None),
            (headers(&[(header::IF_NONE_MATCH, "*")]), None, Some(Some(TagState::Absent))),
            (headers(&[(header::IF_NONE_MATCH, &quoted)]), None, None),
            (headers(&[(header::IF_MATCH, "*")]), None, None),
            (headers(&[(header::IF_MATCH, &digest.to_string())]), None, None),
            (headers(&[(header::IF_MATCH, &format!("W/{quoted}"))]), None, None),
            (headers(&[(header::IF_MATCH, &format!("{quoted}, {quoted}"))]), None, None),
            (headers(&[(header::IF_MATCH, &quoted), (header::IF_NONE_MATCH, "*")]), None, None),
        ];
        for (headers, body, wanted) in cases {
            let found = expected(&headers, body).ok();
            assert_eq!(found, wanted, "{headers:?} with {body:?}");
        }
    }
}
