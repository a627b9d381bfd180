//! Push sessions: open, ask what is missing, commit, abort. Frames have [their own
//! file](super::frames).

use super::{Answer, check_count, record_conflict};
use crate::app::App;
use crate::auth::{Access, Push, Session};
use crate::claims::{self, Asking};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::Path;
use crate::metrics::COMMITS;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pfr_schema::{Digest, Kind, RepositoryName, api};
use pfr_store::PushId;
use std::ops::Range;

/// Opens a push session
///
/// A session is a lease: blobs that it asks about or uploads are kept until it commits, is aborted,
/// or is not used for `lease_seconds`. The first commit creates the repository.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/pushes", operation_id = "open_push", tag = "push",
    params(("repo" = RepositoryName, Path, description = "Repository; slashes as %2F")),
    responses(
        (status = 201, description = "The session", body = api::Push, example = json!({
            "id": "01980f3e-0d0f-7b65-8f0e-3c1f2d0b7a11", "lease_seconds": 3600, "max_digests": 100000, "max_frames_bytes": 67108864,
            "codecs": ["raw", "zstd", "bf16-bitmaps", "bf16-huffman", "f16-huffman", "fp8-huffman"], "claim_seconds": 30
        })),
        failures::Opening,
    ),
)]
pub(crate) async fn open(
    Access { to: repository, domain, .. }: Access<Push>,
    State(app): State<App>,
) -> Answer<(StatusCode, Json<api::Push>)> {
    let session = domain.store.open_push(&repository).await?;
    let push = api::Push {
        id: session.id.to_string(),
        lease_seconds: session.lease.as_secs(),
        max_digests: app.max_digests as u64,
        max_frames_bytes: app.max_frames_bytes,
        codecs: domain.store.options().codecs,
        claim_seconds: claims::LONGEST.as_secs(),
    };
    Ok((StatusCode::CREATED, Json(push)))
}

/// Asks which blobs the registry lacks
///
/// Answers with positions in the concatenated groups as `[start, count]`, ascending. A blob that is
/// not listed is stored, complete with everything it lists, and leased to the session. In groups
/// with `claim`, `coming` has the missing blobs that other sessions are about to send: send what
/// is left first, then ask about these again after `wait_ms`. A claim ends with its push, when its
/// client does not send, and after `claim_seconds` of the session at the latest. Whatever is
/// missing may be sent at any time.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/pushes/{id}/missing", operation_id = "missing", tag = "push",
    params(("repo" = RepositoryName, Path, description = "Repository"), ("id" = String, Path, description = "Push session")),
    request_body(content = api::MissingRequest, example = json!({"groups": [
        {"kind": "tree", "digests": ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]},
        {"kind": "blob", "digests": ["sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"], "claim": 1}
    ]})),
    responses(
        (status = 200, description = "What is missing", body = api::MissingResponse, example = json!({
            "missing": [[0, 2]], "coming": [[1, 1]], "wait_ms": 200
        })),
        failures::Pushing,
    ),
)]
pub(crate) async fn missing(
    Session { repository, domain, push, caller }: Session,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::MissingRequest>,
) -> Answer<Json<api::MissingResponse>> {
    check_count(&app, request.groups.len())?;
    check_count(&app, request.groups.iter().map(|group| group.digests.len()).sum())?;
    // The positions of groups that claim, and how many blobs each claims.
    let mut claiming: Vec<(Range<usize>, u64)> = Vec::new();
    let mut wanted: Vec<(Digest, Kind)> = Vec::new();
    for group in request.groups {
        let start = wanted.len();
        wanted.extend(group.digests.into_iter().map(|digest| (digest, group.kind)));
        claiming.extend(group.claim.map(|most| (start..wanted.len(), most)));
    }
    let asked = if claiming.is_empty() { Vec::new() } else { wanted.clone() };
    let question = app.claims.question(&push);
    let positions = caller.missing(&domain, &push, wanted).await?;
    let asking = Asking { domain: &domain.name, repository: &repository, push: &push, caller: &caller };
    let coming = if claiming.is_empty() {
        Vec::new()
    } else {
        let in_groups = claiming.iter().flat_map(|(group, _)| group.clone());
        let stored = in_groups.filter(|position| positions.binary_search(position).is_err()).map(|position| asked[position]);
        let groups = claiming.iter().map(|(group, most)| {
            let bounds = [group.start, group.end].map(|bound| positions.partition_point(|position| *position < bound));
            (positions[bounds[0]..bounds[1]].iter().map(|position| (*position, asked[*position])), *most)
        });
        app.claims.ask(&asking, stored, groups)
    };
    drop(question);
    let wait_ms = (!coming.is_empty()).then_some(claims::WAIT.as_millis() as u64);
    Ok(Json(api::MissingResponse { missing: ranges(positions), coming: ranges(coming), wait_ms }))
}

/// Commits a snapshot
///
/// In one transaction: the manifest becomes visible in the repository and the tag moves, if
/// `if_tag_is` holds. The session ends. While its lease lasts, the same commit again changes
/// nothing and gets the same answer.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/pushes/{id}/commit", operation_id = "commit", tag = "push",
    params(("repo" = RepositoryName, Path, description = "Repository"), ("id" = String, Path, description = "Push session")),
    request_body(content = api::CommitRequest, example = json!({
        "manifest": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "tag": "latest", "if_tag_is": "absent"
    })),
    responses(
        (status = 201, description = "Committed; new in this repository", body = api::Committed),
        (status = 200, description = "Committed; the repository had it already", body = api::Committed),
        failures::Committing,
    ),
)]
pub(crate) async fn commit(
    Access { to: repository, domain, caller, trail, .. }: Access<Push>,
    Path(push): Path<PushId>,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::CommitRequest>,
) -> Answer<(StatusCode, Json<api::Committed>)> {
    trail.is_about(request.manifest);
    caller.must_have(&domain, &push, request.manifest).await?;
    let store = domain.store.audited(trail.change(201, Some(200)));
    let commit = store.commit_in(&repository, &push, request.manifest, request.tag, request.if_tag_is);
    let committed = commit.await.map_err(record_conflict)?;
    app.claims.end(&domain.name, &repository, &push);
    metrics::counter!(COMMITS, "created" => if committed.created { "true" } else { "false" }).increment(1);
    let status = if committed.created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(committed)))
}

/// Aborts a push session
///
/// Blobs that it uploaded become garbage, unless another push leases them.
#[utoipa::path(
    delete, path = "/v1/repositories/{repo}/pushes/{id}", operation_id = "abort_push", tag = "push",
    params(("repo" = RepositoryName, Path, description = "Repository"), ("id" = String, Path, description = "Push session")),
    responses((status = 204, description = "The session is over"), failures::Aborting),
)]
pub(crate) async fn abort(Session { repository, domain, push, .. }: Session, State(app): State<App>) -> Answer<StatusCode> {
    domain.store.abort(&push).await?;
    app.claims.end(&domain.name, &repository, &push);
    Ok(StatusCode::NO_CONTENT)
}

/// Ascending positions as `[start, count]`.
fn ranges(positions: Vec<usize>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for position in positions {
        let position = position as u64;
        match ranges.last_mut() {
            Some((start, count)) if *start + *count == position => *count += 1,
            _ => ranges.push((position, 1)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    #[test]
    fn positions_that_follow_each_other_are_one_range() {
        assert_eq!(super::ranges(vec![]), []);
        assert_eq!(super::ranges(vec![0, 1, 2, 5, 7, 8]), [(0, 3), (5, 1), (7, 2)]);
    }
}
