//! `pf verify`: every byte of snapshots is read and hashed where they are stored.

use crate::cli::args::Verify;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Status, watch};
use parking_lot::Mutex;
use pfr_client::Site;
use pfr_client::json::ErrorDocument;
use pfr_schema::api::Verified;
use pfr_schema::{Digest, ErrorCode, Reference, Selector};
use pfr_store::{Store, VerifyProgress};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub async fn run(context: &mut Context, args: Verify) -> Result<(), Failure> {
    if let (Some(key), Some(reference)) = (&args.key, &args.reference) {
        return super::signing::verify(context, args.at, reference, key).await;
    }
    let site = context.site(args.at, args.reference.as_ref()).await?;
    let targets = match &args.reference {
        Some(reference) => {
            let selector = reference.selector_or_latest();
            let digest = site.snapshot(&reference.repository, &selector).await?.digest;
            BTreeMap::from([(digest, Reference { registry: None, repository: reference.repository.clone(), selector: Some(selector) })])
        }
        None => tagged(&site).await?,
    };
    let (mut proofs, mut failures) = (Vec::new(), Vec::new());
    for (digest, reference) in targets {
        let (name, start) = (reference.to_string(), Instant::now());
        let verified = match &site {
            Site::Registry(_) => {
                let status = || Status::of_phase("the registry reads and hashes");
                watch(context.quiet, status, site.verify(&reference.repository, digest)).await.map_err(Failure::from)
            }
            Site::Store(store) => local(context.quiet, store, digest).await,
        };
        // One of several failures does not end the command: the other snapshots are verified, too.
        let verified = match verified {
            Err(failure) if args.reference.is_some() => return Err(failure.context(&name)),
            other => other,
        };
        if !context.json {
            let paint = context.out.paint;
            let (outcome, detail) = match &verified {
                Ok(verified) => (paint.green("verified"), paint.dim(&describe(verified, start.elapsed()))),
                Err(failure) => (paint.red("failed"), failure.to_string()),
            };
            context.out.line(format!("{outcome} {name}  {}  {detail}", paint.yellow(&digest.short())))?;
            context.out.flush()?;
        }
        match verified {
            Ok(verified) => proofs.push(Proof::Complete(verified)),
            Err(failure) => {
                proofs.push(Proof::Failed { digest, name, error: failure.document() });
                failures.push(failure);
            }
        }
    }
    match (context.json, &args.reference) {
        (true, Some(_)) => proofs.first().map_or(Ok(()), |proof| context.out.json(proof)),
        (true, None) => context.out.json(&proofs),
        (false, _) if proofs.is_empty() => context.out.line("nothing here has a tag"),
        (false, _) => Ok(()),
    }?;
    worst(failures, proofs.len()).map_or(Ok(()), Err)
}

/// The result for one snapshot, as JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Proof {
    Complete(Verified),
    Failed { digest: Digest, name: String, error: ErrorDocument },
}

/// One failure for all: damage goes before a snapshot that could not be read.
fn worst(failures: Vec<Failure>, of: usize) -> Option<Failure> {
    let damage = ErrorCode::CorruptStore.exit_code();
    let count = failures.len();
    let worst = failures.into_iter().max_by_key(|failure| (failure.exit() == damage, failure.exit()))?;
    Some(if of == 1 { worst } else { worst.context(&format!("{count} of {of} snapshots failed; one of them")) })
}

fn describe(verified: &Verified, time: Duration) -> String {
    // State tensors are verified beyond their bytes.
    let values = match (verified.values_computed, verified.values_attested) {
        (0, 0) => String::new(),
        (n, 0) => format!(", {} recomputed", count(n, "value")),
        (n, attested) => format!(", {} recomputed and {attested} attested", count(n, "value")),
    };
    let (blobs, read) = (count(verified.blobs, "blob"), bytes(verified.bytes));
    // A registry of an older version does not say how many bytes are stored.
    let stored = match verified.stored_bytes {
        stored if stored > 0 && stored < verified.bytes - verified.bytes / 100 => format!(" ({} stored)", bytes(stored)),
        _ => String::new(),
    };
    format!("{blobs}, {read}{stored} read and hashed{values} in {}", duration(time))
}

/// Every tagged snapshot, by one of its tags.
async fn tagged(site: &Site) -> Result<BTreeMap<Digest, Reference>, Failure> {
    let mut targets = BTreeMap::new();
    for repository in site.repositories().await? {
        for tag in site.tags(&repository.name).await? {
            let selector = Some(Selector::Tag { tag: tag.name, back: 0 });
            targets.entry(tag.digest).or_insert_with(|| Reference { registry: None, repository: repository.name.clone(), selector });
        }
    }
    Ok(targets)
}

async fn local(quiet: bool, store: &Store, digest: Digest) -> Result<Verified, Failure> {
    let seen = Mutex::new(VerifyProgress::default());
    let status = || {
        let progress = *seen.lock();
        Status { phase: "reading and hashing".into(), total: progress.total_bytes, done: progress.bytes, deduplicated: 0 }
    };
    let mut update = |progress| *seen.lock() = progress;
    Ok(watch(quiet, status, store.verify(&digest, &mut update)).await?)
}
