//! Query strings, as validated types.

use crate::problem::ApiError;
use axum::extract::FromRequestParts;
use axum::http::Uri;
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A query string.
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        Self::of(&parts.uri)
    }
}

impl<T: DeserializeOwned> Query<T> {
    /// The query of a URI.
    pub(crate) fn of(uri: &Uri) -> Result<Self, ApiError> {
        let query = axum::extract::Query::try_from_uri(uri).map_err(|e| ApiError::invalid(refusal(&e.body_text())))?;
        Ok(Self(query.0))
    }
}

/// What axum and serde say about a query, as a sentence: `limit: invalid digit found in string`.
fn refusal(text: &str) -> String {
    let reason = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(text);
    let (name, why) = reason.split_once(": ").unwrap_or(("", reason));
    if why.starts_with("unknown field") {
        return format!("the address has an {}", why.replacen("field", "parameter", 1));
    }
    match name {
        "" => format!("the parameters of the address are not accepted: {why}"),
        name if ["digit", "integer", "too large"].iter().any(|word| why.contains(word)) => {
            format!("the parameter `{name}` of the address must be a whole number")
        }
        name => format!("the parameter `{name}` of the address is not accepted: {why}"),
    }
}

/// Which page of a list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Paging {
    /// Where to go on: `next` of the page before.
    #[param(max_length = 1024)]
    after: Option<String>,
    /// Most rows, 1 to 1,000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

impl Paging {
    const MOST: usize = 1000;

    /// For a list that has more parameters than these.
    pub(crate) fn new(after: Option<String>, limit: Option<usize>) -> Self {
        Self { after, limit }
    }

    /// Cursor and checked limit.
    pub(crate) fn checked(self) -> Result<(Option<String>, usize), ApiError> {
        if self.after.as_ref().is_some_and(|cursor| cursor.len() > 1024) {
            return Err(ApiError::invalid("`after` is not a cursor that this registry gave out"));
        }
        Ok((self.after, limit(self.limit, Self::MOST)?))
    }
}

/// How far up a lineage goes.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Depth {
    /// Most snapshots, 1 to 10,000.
    #[param(default = 100, minimum = 1, maximum = 10000)]
    limit: Option<usize>,
}

impl Depth {
    /// The checked limit.
    pub(crate) fn checked(&self) -> Result<usize, ApiError> {
        limit(self.limit, 10_000)
    }
}

/// A limit within bounds, 100 if none was given.
fn limit(given: Option<usize>, most: usize) -> Result<usize, ApiError> {
    match given.unwrap_or(100) {
        limit if (1..=most).contains(&limit) => Ok(limit),
        limit => Err(ApiError::invalid(format!("expected a limit from 1 to {most}, found {limit}"))),
    }
}
