//! Signatures of snapshots, and the policies that let tags be put only on what is signed.

use super::Answer;
use crate::auth::{Access, Admin, AllRepositories, Pull, Push};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use crate::problem::ApiError;
use axum::Json;
use pfr_schema::signature::MOST;
use pfr_schema::{RepositoryName, Selector, api};

/// Lists manifests with signatures, oldest first
///
/// For programs that copy repositories. What a snapshot is signed with is in its details.
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/signatures", operation_id = "list_signatures", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository"), Paging),
    responses((status = 200, description = "One page", body = api::SignatureList), failures::Reading),
)]
pub(crate) async fn list(
    Access { to: repository, domain, .. }: Access<Pull>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::SignatureList>> {
    let (after, limit) = paging.checked()?;
    let page = domain.store.signature_list(&repository, after, limit).await?;
    Ok(Json(api::SignatureList { signatures: page.rows, next: page.next }))
}

/// Adds signatures to a snapshot
///
/// Those that it has already are left out, so this may be repeated. They are stored in the form of
/// cosign: as a manifest that refers to the snapshot. Whether they are good is not checked: their
/// readers have the public keys.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/snapshots/{ref}/signatures", operation_id = "sign", tag = "write",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "`tag`, `tag~N` or a digest; the signatures name the digest"),
    ),
    request_body(content = api::SignRequest, example = json!({"signatures": [{
        "payload": "{\"critical\":{\"identity\":{\"docker-reference\":\"team/agent\"},\"image\":{\"docker-manifest-digest\":\"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"},\"type\":\"cosign container image signature\"},\"optional\":null}",
        "signature": "5VZDAMNgrHKQhuLMgG6CIoSHfy64dhTVLgIMVCEwSS6NNt4SpxRumxQTsR44kqnuMUQhUadDJaLWqZPLvWNuCA=="
    }]})),
    responses((status = 200, description = "All its signatures", body = api::Signatures), failures::Signing),
)]
pub(crate) async fn sign(
    Access { to: repository, domain, trail, .. }: Access<Push>,
    Path(selector): Path<Selector>,
    JsonBody { value: request, .. }: JsonBody<api::SignRequest>,
) -> Answer<Json<api::Signatures>> {
    if request.signatures.len() > MOST {
        return Err(ApiError::invalid(format!("a snapshot has at most {MOST} signatures, found {}", request.signatures.len())));
    }
    if let Selector::Digest(digest) = &selector {
        trail.is_about(*digest);
    }
    let digest = domain.store.resolve(&repository, &selector).await?;
    let store = domain.store.audited(trail.change(200, None));
    let signatures = store.add_signatures(&repository, &digest, &request.signatures).await?;
    Ok(Json(api::Signatures { digest, signatures }))
}

/// Shows the signing policies
#[utoipa::path(
    get, path = "/v1/signing", operation_id = "get_signing", tag = "operations",
    responses((status = 200, description = "The policies", body = api::SigningPolicies), failures::Listing),
)]
pub(crate) async fn get(Access { domain, .. }: Access<Admin, AllRepositories>) -> Answer<Json<api::SigningPolicies>> {
    Ok(Json(domain.store.metadata().signing().await?.policies))
}

/// Sets the signing policies
///
/// All at once. They hold for every tag that is put after this is answered, and say nothing of tags
/// that are there.
#[utoipa::path(
    put, path = "/v1/signing", operation_id = "set_signing", tag = "operations",
    request_body(content = api::SigningPolicies, example = json!({"policies": [{
        "name": "releases", "repositories": "team/*", "tags": ["v*"],
        "keys": ["-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n"]
    }]})),
    responses((status = 200, description = "The policies", body = api::SigningPolicies), failures::Setting),
)]
pub(crate) async fn put(
    Access { domain, trail, .. }: Access<Admin, AllRepositories>,
    JsonBody { value: policies, .. }: JsonBody<api::SigningPolicies>,
) -> Answer<Json<api::SigningPolicies>> {
    policies.check().map_err(|error| ApiError::invalid(error.to_string()))?;
    domain.store.metadata().set_signing(policies.clone(), Some(trail.change(200, None))).await?;
    tracing::info!(domain = %domain.name, policies = policies.policies.len(), "signing policies set");
    Ok(Json(policies))
}
