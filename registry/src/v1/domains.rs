//! Domains: making, listing and deleting them. These requests belong to no domain, so they have no
//! base path.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, Catalogue};
use crate::background::REMOVAL;
use crate::failures;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pfr_schema::{DomainName, api};
use serde::Deserialize;

/// How a domain is made.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Making {
    /// Whether what it writes to storage is encrypted; without it, as the registry's settings say.
    /// That does not change later.
    encrypted: Option<bool>,
}

/// How a domain is deleted.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub(crate) struct Deleting {
    /// Delete also what is left of a domain that the catalogue does not know, if its tables list
    /// packs and nothing of it lies on the storage. Without it that is refused: the storage may not
    /// be mounted.
    lost: bool,
}

/// Lists domains by name
#[utoipa::path(
    get, path = "/v1/domains", operation_id = "list_domains", tag = "operations",
    params(Paging),
    responses((status = 200, description = "One page", body = api::DomainList), failures::Listing),
)]
pub(crate) async fn list(
    _: Access<Admin, Catalogue>,
    State(app): State<App>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::DomainList>> {
    let (after, limit) = paging.checked()?;
    let page = app.domains.catalogue().list(after, limit).await?;
    Ok(Json(api::DomainList { domains: page.rows, next: page.next }))
}

/// Shows a domain
#[utoipa::path(
    get, path = "/v1/domains/{domain}", operation_id = "get_domain", tag = "operations",
    params(("domain" = DomainName, Path, description = "Its name")),
    responses((status = 200, description = "Also one that is being deleted", body = api::DomainInfo), failures::Listing),
)]
pub(crate) async fn get(
    _: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(name): Path<DomainName>,
) -> Answer<Json<api::DomainInfo>> {
    Ok(Json(app.domains.catalogue().get(&name).await?))
}

/// Makes a domain
///
/// A repeated request changes nothing. If the domain is there, and `encrypted` says what it is not,
/// the answer is `invalid_request`. While a domain of this name is being deleted the answer is
/// `domain_busy`.
#[utoipa::path(
    put, path = "/v1/domains/{domain}", operation_id = "create_domain", tag = "operations",
    params(
        ("domain" = DomainName, Path, description = "Its name: one component of a repository name without dots, at most 40 bytes"),
        Making,
    ),
    responses(
        (status = 201, description = "Made; its API is at `/domains/{domain}/v1`", body = api::DomainInfo),
        (status = 200, description = "It was there", body = api::DomainInfo),
        failures::Creating,
    ),
)]
pub(crate) async fn put(
    Access { trail, .. }: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(name): Path<DomainName>,
    Query(making): Query<Making>,
) -> Answer<(StatusCode, Json<api::DomainInfo>)> {
    let catalogue = app.domains.catalogue().audited(trail.change(201, Some(200)));
    let (domain, is_new) = catalogue.create_as(&name, making.encrypted).await?;
    if is_new {
        tracing::info!(domain = %name, encrypted = domain.encrypted, "domain made");
    }
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(domain)))
}

/// Deletes a domain, with everything in it
///
/// From now on requests do not find it. Its tables and bytes are deleted in the background, and
/// once more after one lease, when no upload to it can be under way any more. After another lease
/// its name can be used again.
#[utoipa::path(
    delete, path = "/v1/domains/{domain}", operation_id = "delete_domain", tag = "operations",
    params(("domain" = DomainName, Path, description = "Its name; `default` cannot be deleted"), Deleting),
    responses((status = 202, description = "It is being deleted", body = api::DomainInfo), failures::Checking),
)]
pub(crate) async fn delete(
    Access { trail, .. }: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(name): Path<DomainName>,
    Query(deleting): Query<Deleting>,
) -> Answer<(StatusCode, Json<api::DomainInfo>)> {
    let domain = app.domains.catalogue().audited(trail.change(202, None)).delete(&name, deleting.lost).await?;
    tracing::info!(domain = %name, "domain is being deleted");
    // Its tasks end now, and not when the catalogue is read again.
    drop(app.domains.get(&name).await);
    app.domains.default_domain().schedule.wake(REMOVAL);
    Ok((StatusCode::ACCEPTED, Json(domain)))
}
