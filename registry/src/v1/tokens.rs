//! Access tokens: making, listing and revoking them. These requests belong to no domain, so they
//! have no base path.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, Catalogue};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use pfr_schema::{AccessTokenId, api};
use pfr_store::NewAccessToken;

/// Lists access tokens in the order in which they were made
///
/// Without their secrets. A token that expired or was revoked is listed for 90 days.
#[utoipa::path(
    get, path = "/v1/tokens", operation_id = "list_tokens", tag = "operations",
    params(Paging),
    responses((status = 200, description = "One page", body = api::AccessTokenList), failures::Listing),
)]
pub(crate) async fn list(
    _: Access<Admin, Catalogue>,
    State(app): State<App>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::AccessTokenList>> {
    let (after, limit) = paging.checked()?;
    let page = app.domains.catalogue().access_tokens().list(after, limit).await?;
    Ok(Json(api::AccessTokenList { tokens: page.rows.into_iter().map(Into::into).collect(), next: page.next }))
}

/// Makes an access token
///
/// The answer is the only place where its secret is. If the answer was lost, revoke the token and
/// make another one.
#[utoipa::path(
    post, path = "/v1/tokens", operation_id = "create_token", tag = "operations",
    request_body(content = api::AccessTokenRequest, example = json!({"label": "build machine", "scopes": ["team/*:pull,push"]})),
    responses((status = 201, description = "Made", body = api::AccessTokenCreated), failures::TokenCreating),
)]
pub(crate) async fn create(
    Access { trail, .. }: Access<Admin, Catalogue>,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::AccessTokenRequest>,
) -> Answer<(StatusCode, [(HeaderName, HeaderValue); 1], Json<api::AccessTokenCreated>)> {
    let api::AccessTokenRequest { label, domain, scopes, expires_at } = request;
    let new = NewAccessToken { label, domain, scopes, expires_at };
    let (token, row) = app.domains.catalogue().audited(trail.change(201, None)).access_tokens().create(new).await?;
    tracing::info!(token = %row.id, label = row.label, "access token made");
    let created = api::AccessTokenCreated { token: token.expose().to_owned(), info: row.into() };
    Ok((StatusCode::CREATED, [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], Json(created)))
}

/// Revokes an access token
///
/// This process refuses it from now on, others within five seconds. Once more changes nothing.
#[utoipa::path(
    delete, path = "/v1/tokens/{token}", operation_id = "revoke_token", tag = "operations",
    params(("token" = AccessTokenId, Path, description = "Its id")),
    responses((status = 204, description = "Revoked"), failures::TokenRevoking),
)]
pub(crate) async fn revoke(
    Access { trail, .. }: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(id): Path<AccessTokenId>,
) -> Answer<StatusCode> {
    app.domains.catalogue().audited(trail.change(204, None)).access_tokens().revoke(&id).await?;
    if let Some(gate) = &app.gate {
        gate.forget(&id);
    }
    tracing::info!(token = %id, "access token revoked");
    Ok(StatusCode::NO_CONTENT)
}
