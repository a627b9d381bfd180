//! Groups of errors for the OpenAPI document: the problems that an endpoint may answer with.

use pfr_schema::ErrorCode::{self, *};
use pfr_schema::api::Problem;
use std::collections::BTreeMap;
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

/// Errors of any request.
const ANY: &[ErrorCode] =
    &[InvalidRequest, InvalidName, Unauthorized, Denied, DomainUnknown, RateLimited, Overloaded, Unavailable, Internal];
/// Further errors of any request with a body.
const BODY: &[ErrorCode] = &[TooLarge, Timeout];

macro_rules! groups {
    ($($(#[$doc:meta])* $name:ident = [$($base:expr),*];)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name;
        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                problems(&[$($base),*])
            }
        }
    )*};
}

groups! {
    /// The liveness probe.
    Alive = [&[InvalidRequest, Internal]];
    /// The description of the API.
    Describing = [&[InvalidRequest, Overloaded, Internal]];
    /// The readiness probe.
    Ready = [&[Unavailable]];
    /// The metrics.
    Scraping = [&[Unauthorized, Denied, Unavailable]];
    /// Reads that name no repository.
    Listing = [ANY, &[CorruptStore]];
    /// Following events.
    Following = [ANY, &[StorageFull]];
    /// Reads in a repository.
    Reading = [ANY, &[AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, NotFound, CorruptStore]];
    /// Verifications of a snapshot.
    Verifying = [ANY, &[
        AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, NotFound, CorruptStore, ValueHashMismatch, InexactStorage,
        TooLarge
    ]];
    /// Searches of the prefix index.
    Matching = [ANY, BODY, &[RepositoryUnknown, CorruptStore]];
    /// Counts of what a deletion would free.
    Counting = [ANY, BODY];
    /// Opening a session.
    Opening = [ANY, &[StorageFull]];
    /// Ending a session.
    Aborting = [ANY, &[PushUnknown, StorageFull]];
    /// Requests for missing blobs in a session.
    Pushing = [ANY, BODY, &[PushUnknown, StorageFull]];
    /// Uploads.
    Uploading = [ANY, BODY, &[
        PushUnknown, CorruptFrame, Truncated, DigestMismatch, LengthMismatch, InvalidDocument, MissingBlobs, StorageFull, QuotaExceeded
    ]];
    /// Commits.
    Committing = [ANY, BODY, &[
        PushUnknown, BlobUnknown, InvalidDocument, TagMoved, TagImmutable, SignatureRequired, CorruptStore, StorageFull, QuotaExceeded
    ]];
    /// Downloads.
    Fetching = [ANY, BODY, &[RepositoryUnknown, BlobUnknown]];
    /// Collections.
    Collecting = [ANY, BODY, &[StorageFull]];
    /// Checks of the whole store.
    Checking = [ANY, &[StorageFull]];
    /// Making a domain.
    Creating = [ANY, &[DomainBusy, StorageFull]];
    /// Setting a quota, or policies; reports of agents.
    Setting = [ANY, BODY, &[StorageFull]];
    /// Making an access token.
    TokenCreating = [ANY, BODY, &[StorageFull]];
    /// Revoking an access token.
    TokenRevoking = [ANY, &[TokenUnknown]];
    /// Forgetting an agent.
    Forgetting = [ANY, &[NotFound, StorageFull]];
    /// Pauses of background tasks.
    Pausing = [ANY, BODY, &[NotFound, StorageFull]];
    /// Reports of past collections.
    Collected = [ANY, &[NotFound]];
    /// Changes of tags and snapshots.
    Tagging = [ANY, BODY, &[
        AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, TagMoved, TagImmutable, SignatureRequired, StorageFull
    ]];
    /// Signatures.
    Signing = [ANY, BODY, &[
        AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, InvalidDocument, StorageFull, QuotaExceeded
    ]];
}

fn problems(groups: &[&[ErrorCode]]) -> BTreeMap<String, RefOr<Response>> {
    let mut by_status: BTreeMap<String, Vec<&'static str>> = BTreeMap::new();
    for code in groups.iter().copied().flatten() {
        by_status.entry(code.status().to_string()).or_default().push(code.name());
    }
    by_status
        .into_iter()
        .map(|(status, names)| {
            let content = Content::new(Some(RefOr::Ref(Ref::from_schema_name(Problem::name()))));
            let response = ResponseBuilder::new().description(names.join(", ")).content(pfr_service::problem::MEDIA_TYPE, content).build();
            (status, RefOr::T(response))
        })
        .collect()
}
