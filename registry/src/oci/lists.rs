//! Lists: tags, repositories, and what refers to a manifest. Longer ones go on behind `Link`.

use super::address::{Address, encoded};
use super::manifests::describe;
use super::{Answer, error, value};
use crate::app::App;
use crate::auth::{Access, Anywhere, Pull, SomeRepositories};
use crate::http::path::Path;
use crate::http::query::Query;
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use pfr_schema::{Digest, media_type};
use serde::Deserialize;
use serde_json::{Value, json};

const FILTERS_APPLIED: HeaderName = HeaderName::from_static("oci-filters-applied");
/// Rows of one answer.
const MOST: usize = 1000;
/// Manifests that are read for one answer, and bytes of the answer after which no further one is.
const REFERRERS: usize = 100;
const REFERRERS_BYTES: usize = 2 << 20;

/// Says that this API is there, and that the caller's token is valid.
pub(crate) async fn ping(_: Access<Pull, Anywhere>) -> Response {
    error::marked(Json(json!({})).into_response())
}

/// Which page of a list.
#[derive(Deserialize)]
pub(crate) struct Paging {
    n: Option<String>,
    last: Option<String>,
}

impl Paging {
    /// Rows wanted, and the name that they come after.
    fn checked(self) -> Answer<(usize, Option<String>)> {
        let n =
            self.n.map_or(Ok(MOST), |n| n.parse::<usize>().map_err(|_| ApiError::invalid(format!("expected n=NUMBER, found {n:?}"))))?;
        Ok((n.min(MOST), self.last.filter(|last| !last.is_empty())))
    }
}

/// An answer that goes on there.
fn paged(answer: Value, next: Option<String>) -> Response {
    let mut response = Json(answer).into_response();
    if let Some(next) = next {
        response.headers_mut().insert(header::LINK, value(&format!("<{next}>; rel=\"next\"")));
    }
    response
}

pub(crate) async fn tags(
    Access { to: repository, domain, .. }: Access<Pull>,
    address: Address,
    Query(paging): Query<Paging>,
) -> Answer<Response> {
    let (n, last) = paging.checked()?;
    let mut page = domain.store.all_tags(&repository, last, n.max(1)).await?;
    if n == 0 {
        (page.rows, page.next) = (Vec::new(), None);
    }
    let next = page.next.map(|last| format!("{}?n={n}&last={last}", address.of("tags", "list")));
    Ok(paged(json!({"name": name_of(&address), "tags": page.rows}), next))
}

/// The name of a repository as the client has it.
fn name_of(address: &Address) -> &str {
    address.0.split_once("/v2/").map_or("", |(_, name)| name)
}

pub(crate) async fn catalog(
    Access { domain, caller, .. }: Access<Pull, SomeRepositories>,
    Query(paging): Query<Paging>,
) -> Answer<Response> {
    let (n, last) = paging.checked()?;
    let page = caller.repositories(&domain, last, n.max(1)).await?;
    let rows = if n == 0 { Vec::new() } else { page.rows };
    let names: Vec<String> = rows.into_iter().map(|row| row.name.to_string()).collect();
    let next = page.next.filter(|_| n > 0).map(|last| format!("_catalog?n={n}&last={}", encoded(&last)));
    Ok(paged(json!({"repositories": names}), next))
}

/// What a list of referrers is asked for.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Filter {
    artifact_type: Option<String>,
    /// Where the list goes on.
    after: Option<i64>,
}

pub(crate) async fn referrers(
    Access { to: repository, domain, .. }: Access<Pull>,
    Path(subject): Path<Digest>,
    State(app): State<App>,
    address: Address,
    Query(Filter { artifact_type, after }): Query<Filter>,
) -> Answer<Response> {
    if artifact_type.as_ref().is_some_and(|text| text.contains('\0')) {
        return Err(ApiError::invalid("no artifact type holds a NUL"));
    }
    let rows = domain.store.referrers(&repository, subject, artifact_type.clone(), after.unwrap_or(0), REFERRERS).await?;
    let (mut manifests, mut bytes, mut last) = (Vec::new(), 0, None);
    let _permit = app.documents().await?;
    for row in &rows {
        if bytes > REFERRERS_BYTES {
            break;
        }
        last = Some(row.id);
        if let Some(descriptor) = describe(&domain.store, row.digest, row.size).await? {
            bytes += descriptor.to_string().len();
            manifests.push(descriptor);
        }
    }
    let is_last = rows.len() < REFERRERS && last == rows.last().map(|row| row.id);
    let next = last.filter(|_| !is_last).map(|last| {
        let filter = artifact_type.as_deref().map(|text| format!("&artifactType={}", encoded(text))).unwrap_or_default();
        format!("{}?after={last}{filter}", address.of("referrers", subject))
    });
    let mut response = paged(json!({"schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": manifests}), next);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type::OCI_INDEX));
    if artifact_type.is_some() {
        response.headers_mut().insert(FILTERS_APPLIED, HeaderValue::from_static("artifactType"));
    }
    Ok(response)
}
