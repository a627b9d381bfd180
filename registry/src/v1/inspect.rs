//! Reads that look into snapshots: lineage, flat page manifests, differences, verification,
//! matching.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Pull};
use crate::failures;
use crate::http::conditions::etag;
use crate::http::json::JsonBody;
use crate::http::path::{OtherRef, Path};
use crate::http::query::{Depth, Query};
use crate::problem::ApiError;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use pfr_schema::flat::FlatManifest;
use pfr_schema::media_type::FLAT_MANIFEST;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, api};
use serde::Deserialize;

/// Lists a snapshot and its ancestors
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/snapshots/{ref}/lineage", operation_id = "lineage", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "`tag`, `tag~N` or a digest, which may be cut short"),
        Depth,
    ),
    responses((status = 200, description = "The snapshot first, then ancestors, nearest first", body = api::Lineage), failures::Reading),
)]
pub(crate) async fn lineage(
    Access { to: repository, domain, .. }: Access<Pull>,
    Path(selector): Path<Selector>,
    Query(depth): Query<Depth>,
) -> Answer<Json<api::Lineage>> {
    let limit = depth.checked()?;
    let digest = domain.store.resolve(&repository, &selector).await?;
    Ok(Json(domain.store.lineage(&repository, &digest, limit).await?))
}

/// Selects a page tree.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShardQuery {
    /// Group of layers; needed if the snapshot has several.
    group: Option<String>,
    /// Rank; needed if the snapshot has several.
    #[param(minimum = 0, maximum = 4294967295_u32)]
    rank: Option<u32>,
}

/// Returns a page tree in its flat form
///
/// Byte for byte the manifest that was pushed: layout `paged-batchinvariant-v1`.
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/snapshots/{ref}/page-manifest", operation_id = "page_manifest", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "`tag`, `tag~N` or a digest, which may be cut short"),
        ShardQuery,
    ),
    responses(
        (status = 200, description = "The flat manifest", content_type = "application/vnd.pf.page-manifest.v1+json", body = Object,
         headers(("ETag" = String, description = "The manifest's digest in quotes"))),
        failures::Reading,
    ),
)]
pub(crate) async fn page_manifest(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
    Query(shard): Query<ShardQuery>,
) -> Answer<Response> {
    let digest = domain.store.resolve(&repository, &selector).await?;
    let _permit = app.documents().await?;
    let manifest = choose(domain.store.flat_manifests(&digest).await?, &shard)?;
    let encode = move || {
        let bytes = manifest.to_bytes();
        (Digest::sha256(&bytes), bytes)
    };
    let (digest, bytes) = pfr_service::task::spawn_blocking(encode).await.map_err(|e| ApiError::internal(e.to_string()))?;
    let mut response = Response::new(Body::from(bytes));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(FLAT_MANIFEST));
    response.headers_mut().insert(header::ETAG, etag(&digest));
    Ok(response)
}

/// The page manifest that the query selects.
fn choose(manifests: Vec<(String, u32, FlatManifest)>, shard: &ShardQuery) -> Answer<FlatManifest> {
    let names: Vec<String> = manifests.iter().map(|(group, rank, _)| format!("group={group}&rank={rank}")).collect();
    let selected = |group: &str, rank: u32| shard.group.as_deref().is_none_or(|g| g == group) && shard.rank.is_none_or(|r| r == rank);
    let mut selected = manifests.into_iter().filter(|(group, rank, _)| selected(group, *rank));
    match (selected.next(), selected.next()) {
        (Some((_, _, manifest)), None) => Ok(manifest),
        (Some(_), Some(_)) => {
            Err(ApiError::invalid(format!("the snapshot has several page manifests; choose one of {}", names.join(", "))))
        }
        (None, _) if names.is_empty() => Err(ApiError::new(ErrorCode::NotFound, "the snapshot has no page tree with a flat form")),
        (None, _) => Err(ApiError::new(ErrorCode::NotFound, format!("no such page manifest; there are {}", names.join(", ")))),
    }
}

/// Compares two snapshots
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/snapshots/{ref}/diff/{other}", operation_id = "diff", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "The first: `tag`, `tag~N` or a digest, which may be cut short"),
        ("other" = Selector, Path, description = "The second"),
    ),
    responses((status = 200, description = "By group and rank", body = api::Diff), failures::Reading),
)]
pub(crate) async fn diff(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
    Path(OtherRef(other)): Path<OtherRef>,
) -> Answer<Json<api::Diff>> {
    let a = domain.store.resolve(&repository, &selector).await?;
    let b = domain.store.resolve(&repository, &other).await?;
    let _permit = app.documents().await?;
    Ok(Json(domain.store.diff(&a, &b).await?))
}

/// Verifies a snapshot
///
/// Reads and hashes every blob that it reaches, and computes the value hashes of checkpoint
/// tensors. Takes as long as reading the snapshot; closing the connection stops it. Refused with
/// `too_large` if the values have more than 16 times the bytes of their payloads and 64 MiB.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/snapshots/{ref}/verify", operation_id = "verify", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository"), ("ref" = Selector, Path, description = "`tag`, `tag~N` or a digest, which may be cut short")),
    responses((status = 200, description = "Every blob is what its name says", body = api::Verified), failures::Verifying),
)]
pub(crate) async fn verify(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
) -> Answer<Json<api::Verified>> {
    let digest = domain.store.resolve(&repository, &selector).await?;
    let permit = app.verification()?;
    Ok(Json(domain.store.verify_in(&digest, Some(permit), &mut |_| {}).await?))
}

/// Finds a snapshot that tokens can be resumed from
///
/// The longest prefix at which both keys hold: that of the pages and that of the checkpoint.
/// `rejected` says why longer ones do not.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/match", operation_id = "match_prefix", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository")),
    request_body(content = api::MatchRequest),
    responses((status = 200, description = "The match, or none", body = api::MatchResponse), failures::Matching),
)]
pub(crate) async fn match_prefix(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::MatchRequest>,
) -> Answer<Json<api::MatchResponse>> {
    let _permit = app.documents().await?;
    Ok(Json(domain.store.match_prefix(&repository, &request).await?))
}
