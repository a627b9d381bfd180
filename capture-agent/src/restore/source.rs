//! Finds the snapshot in the local store if the request says so or names a digest that is there.
//! Otherwise pulls it from the registry, if it fits the engine.

use crate::Agent;
use crate::error::{Error, Result};
use pfr_client::{Destination, Progress};
use pfr_schema::agent::{Outline, RestoreRequest};
use pfr_schema::{Digest, Reference, Selector};

/// A snapshot that is complete in the local store.
#[derive(Debug)]
pub(super) struct Found {
    pub digest: Digest,
    pub bytes_pulled: u64,
}

/// Finds a snapshot for an engine. What does not fit the engine is refused before any frame is
/// asked for.
pub(super) async fn find(agent: &Agent, engine: &str, request: &RestoreRequest) -> Result<Found> {
    let reference: Reference = request.reference.parse()?;
    let (repository, selector) = (&reference.repository, reference.selector_or_latest());
    if request.local {
        let digest = agent.store().resolve(repository, &selector).await?;
        // A digest finds a snapshot in any repository, but it must be in this one.
        agent.store().snapshot(repository, &digest).await?;
        agent.store().touch(repository, &digest).await?;
        return Ok(Found { digest, bytes_pulled: 0 });
    }
    // A tag may have moved in the registry; a digest names the same snapshot for ever.
    if matches!(selector, Selector::Digest(_) | Selector::Prefix(_))
        && let Ok(digest) = agent.store().resolve(repository, &selector).await
    {
        agent.store().touch(repository, &digest).await?;
        return Ok(Found { digest, bytes_pulled: 0 });
    }
    let registry = reference.registry.as_deref().or(agent.config().registry.as_deref());
    let registry = registry.ok_or_else(|| {
        Error::Invalid("the reference names no registry and the agent has none; name one, or restore from the local store (--local)".into())
    })?;
    let remote = agent.config().remote_to_pull_from(registry)?;
    let (store, tag) = (agent.store().clone(), selector.tag().cloned());
    let destination = Destination::Store { store, repository: repository.clone(), tag };
    // Pulls in the background give way.
    let _first = agent.priority().restore();
    let pulled = async {
        let said = pfr_client::look_up(&remote, repository, &selector).await?;
        agent.check(engine, &Outline::of(&said, request.reshard)?)?;
        Ok::<_, Error>(pfr_client::pull_found(&remote, repository, &said, &destination, &Progress::default()).await?)
    };
    match pulled.await {
        Ok(report) => {
            agent.pull_rate().note(report.bytes_received_raw, report.seconds);
            Ok(Found { digest: report.digest, bytes_pulled: report.bytes_received })
        }
        Err(Error::Client(pfr_client::Error::Unreachable { url, reason, attempts })) => {
            // The tag may have moved in the registry, so the local one is not used without `local`.
            let here = agent.store().resolve(repository, &selector).await.is_ok();
            let hint = if here { "; this host has a snapshot of that name: restore it with --local" } else { "" };
            Err(pfr_client::Error::Unreachable { url, reason: format!("{reason}{hint}"), attempts }.into())
        }
        Err(error) => Err(error),
    }
}
