//! Handlers, one file a group of endpoints. A handler parses nothing (its extractors did), asks the store, and shapes the answer.

pub(crate) mod forks;
pub(crate) mod frames;
pub(crate) mod gc;
pub(crate) mod inspect;
pub(crate) mod integrity;
pub(crate) mod pushes;
pub(crate) mod repositories;
pub(crate) mod snapshots;
pub(crate) mod stats;
pub(crate) mod tags;
pub(crate) mod tasks;

use crate::app::App;
use crate::problem::Failure;
use pfr_schema::{ErrorCode, RepositoryName, Selector};

/// What handlers return.
pub(crate) type Answer<T> = Result<T, Failure>;

/// Refuses more digests than one request may carry.
fn check_count(app: &App, digests: usize) -> Answer<()> {
    if digests > app.max_digests {
        let detail = format!("{digests} digests in one request, the limit is {}; send them in several", app.max_digests);
        return Err(Failure::new(ErrorCode::TooLarge, detail));
    }
    Ok(())
}

/// Refuses a repository that does not exist.
async fn must_exist(app: &App, repository: &RepositoryName) -> Answer<()> {
    app.store.tags(repository, None, 1).await?;
    Ok(())
}

/// The digest that a body's `snapshot` means.
async fn resolve(app: &App, repository: &RepositoryName, snapshot: &str) -> Answer<pfr_schema::Digest> {
    let selector: Selector = snapshot.parse()?;
    Ok(app.store.resolve(repository, &selector).await?)
}

/// The snapshot that a change named which was made before under the same key.
async fn changed_before(app: &App, repository: &RepositoryName, once: Option<&pfr_store::Once>) -> Answer<Option<pfr_schema::Digest>> {
    match once {
        Some(once) => Ok(app.store.changed_before(repository, once).await?),
        None => Ok(None),
    }
}

/// Counts a conflict on its way to the caller.
fn counted(error: pfr_store::Error) -> Failure {
    if error.code() == ErrorCode::TagMoved {
        metrics::counter!(crate::telemetry::metrics::TAG_CONFLICTS).increment(1);
    }
    error.into()
}
