//! `pf pull`: a snapshot from a registry, into the local store or a directory.

use super::push::{deduplicated, stored};
use crate::cli::args::Pull;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Status, watch};
use pfr_client::{Destination, Error, Progress, PullReport};
use pfr_schema::Reference;
use pfr_schema::agent::Outline;
use std::path::Path;
use std::time::Duration;

pub async fn run(context: &mut Context, args: Pull) -> Result<(), Failure> {
    args.dir.as_deref().map_or(Ok(()), check)?;
    let remote = context.remote(Some(&args.reference))?;
    let remote = match context.verify_keys(args.verify_key.as_deref())? {
        Some(keys) => remote.verifying(keys),
        None => remote,
    };
    let selector = args.reference.selector_or_latest();
    let repository = args.reference.repository.clone();
    let destination = match &args.dir {
        // The local store only saves requests to the registry. So the pull also works if there is
        // no local store, or if it cannot be opened.
        Some(path) => Destination::Directory { path: path.clone(), store: context.existing_store().await.ok() },
        None => Destination::Store { store: context.store().await?, repository: repository.clone(), tag: selector.tag().cloned() },
    };
    let progress = Progress::default();
    let agent = match &args.engine {
        Some(_) => Some(context.agent_beside_registry(args.at.agent.as_deref())?),
        None => None,
    };
    let work = async {
        let (Some(agent), Some(engine)) = (&agent, &args.engine) else {
            return pfr_client::pull(&remote, &repository, &selector, &destination, &progress).await;
        };
        let detail = pfr_client::look_up(&remote, &repository, &selector).await?;
        let digest = detail.summary.digest;
        let outline = Outline::of(&detail, false).map_err(|error| Error::Unsuitable { digest, reason: error.to_string() })?;
        agent.check(engine, &outline).await?;
        pfr_client::pull_found(&remote, &repository, &detail, &destination, &progress).await
    };
    let report = watch(context.quiet, || Status::of(&progress), work).await?;
    if let Destination::Store { store, .. } = &destination {
        super::gc::tidy(context, store).await;
    }
    let summary = format!("{}, {}", brief(&report), duration(Duration::from_secs_f64(report.seconds)));
    context.report(&report, [summary], &report.digest.to_string())
}

/// Refuses a new directory whose name looks like a second reference.
fn check(dir: &Path) -> Result<(), Failure> {
    let name = dir.to_string_lossy();
    let is_meant = name.starts_with(['.', '/']) || !name.contains([':', '@']) || dir.exists();
    if is_meant || !name.parse::<Reference>().is_ok_and(|reference| reference.selector.is_some()) {
        return Ok(());
    }
    let message = format!("there is no directory {name}, and the name looks like a second reference; a pull takes one reference");
    let hint = format!("if a directory is meant, write ./{name}; without DIR the snapshot goes to the local store, under its own name");
    Err(Failure::usage(message).hint(hint))
}

/// One line about a pull, without the time that it took.
pub fn brief(report: &PullReport) -> String {
    format!(
        "{}, {}: received {} ({}){}",
        count(report.pages, "page"),
        bytes(report.bytes_raw),
        count(report.blobs_received, "blob"),
        stored(report.bytes_received_raw, report.bytes_received),
        deduplicated(report.bytes_deduplicated, report.bytes_raw, "already here")
    )
}

#[cfg(test)]
mod tests {
    use super::check;
    use std::path::Path;

    #[test]
    fn a_new_directory_with_a_name_like_a_reference_is_refused() {
        for reference in ["team/agent:x", "agent:x", "team/agent@2a19b2c9", "h:1/agent:x", "http://h/agent:x~1"] {
            let failure = check(Path::new(reference)).unwrap_err();
            assert_eq!(failure.exit(), 1);
            assert!(failure.document().hint.unwrap().contains(&format!("./{reference}")), "{failure}");
        }
        for path in ["out", "team/agent", "./team/agent:x", "../a:b", "/a:b", "backup~1", "A:B", "a:b:c"] {
            assert!(check(Path::new(path)).is_ok(), "{path}");
        }
    }
}
