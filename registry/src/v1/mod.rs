//! Handlers of `/v1`, one file for each group of endpoints. The extractors have parsed the request;
//! a handler asks the store and builds the answer.

pub(crate) mod agents;
pub(crate) mod audit;
pub(crate) mod domains;
pub(crate) mod events;
pub(crate) mod forks;
pub(crate) mod frames;
pub(crate) mod gc;
pub(crate) mod inspect;
pub(crate) mod integrity;
pub(crate) mod pushes;
pub(crate) mod quotas;
pub(crate) mod repositories;
pub(crate) mod retention;
pub(crate) mod signing;
pub(crate) mod snapshots;
pub(crate) mod stats;
pub(crate) mod tags;
pub(crate) mod tasks;
pub(crate) mod tokens;

use crate::app::App;
use crate::audit::Trail;
use crate::problem::ApiError;
use pfr_schema::{ErrorCode, RepositoryName, Selector};
use pfr_store::Store;

/// The result of a handler.
pub(crate) type Answer<T> = Result<T, ApiError>;

/// Refuses more digests than one request may carry.
fn check_count(app: &App, digests: usize) -> Answer<()> {
    if digests > app.max_digests {
        let detail = format!("{digests} digests in one request, the limit is {}; send them in several", app.max_digests);
        return Err(ApiError::new(ErrorCode::TooLarge, detail));
    }
    Ok(())
}

/// Refuses a repository that does not exist.
async fn must_exist(store: &Store, repository: &RepositoryName) -> Answer<()> {
    store.tags(repository, None, 1).await?;
    Ok(())
}

/// The digest of the `snapshot` in a request body. If it says one itself, the audit log has it also
/// where there is no such snapshot.
async fn resolve(store: &Store, repository: &RepositoryName, snapshot: &str, trail: &Trail) -> Answer<pfr_schema::Digest> {
    let selector: Selector = snapshot.parse()?;
    if let Selector::Digest(digest) = &selector {
        trail.is_about(*digest);
    }
    Ok(store.resolve(repository, &selector).await?)
}

/// The snapshot of an earlier change with the same idempotency key, if there was one.
async fn changed_before(store: &Store, repository: &RepositoryName, once: Option<&pfr_store::Once>) -> Answer<Option<pfr_schema::Digest>> {
    match once {
        Some(once) => Ok(store.changed_before(repository, once).await?),
        None => Ok(None),
    }
}

/// Counts a conflict of tags on its way to the client.
fn record_conflict(error: pfr_store::Error) -> ApiError {
    if error.code() == ErrorCode::TagMoved {
        metrics::counter!(crate::metrics::TAG_CONFLICTS).increment(1);
    }
    error.into()
}
