//! `pf verify`: every byte of snapshots is read and hashed where they are stored.

use crate::cli::args::Verify;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Standing, watch};
use pfr_client::Site;
use pfr_client::json::ErrorDocument;
use pfr_schema::api::Verified;
use pfr_schema::{Digest, ErrorCode};
use pfr_store::{Store, VerifyProgress};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

pub async fn run(context: &mut Context, args: Verify) -> Result<(), Failure> {
    let site = context.site(args.at, args.reference.as_ref()).await?;
    let targets = match (&args.reference, &site) {
        (Some(reference), _) => {
            let selector = reference.selector_or_latest();
            let digest = site.snapshot(&reference.repository, &selector).await?.digest;
            BTreeMap::from([(digest, format!("{}:{selector}", reference.repository))])
        }
        (None, _) => tagged(&site).await?,
    };
    if matches!(site, Site::Registry(_)) && args.reference.is_none() {
        return Err(Failure::usage("name the snapshot to verify"));
    }
    let (mut proofs, mut failures) = (Vec::new(), Vec::new());
    for (digest, name) in targets {
        let start = Instant::now();
        let verified = match (&site, &args.reference) {
            (Site::Registry(_), Some(reference)) => {
                let standing = || Standing { phase: "the registry reads and hashes".into(), ..Standing::default() };
                watch(context.quiet, standing, site.verify(&reference.repository, digest)).await.map_err(Failure::from)
            }
            (Site::Store(store), _) => local(context.quiet, store, digest).await,
            (Site::Registry(_), None) => Err(Failure::usage("name the snapshot to verify")),
        };
        let verified = match verified {
            Ok(verified) => verified,
            Err(failure) if args.reference.is_some() => return Err(failure.context(&name)),
            // The others are to be proven as well.
            Err(failure) => {
                if !context.json {
                    let paint = context.out.paint;
                    context.out.line(format!("{} {name}  {}  {failure}", paint.red("failed"), paint.yellow(&digest.short())))?;
                    context.out.flush()?;
                }
                let error = failure.document();
                proofs.push(Proof::Failed { digest, name, error });
                failures.push(failure);
                continue;
            }
        };
        if !context.json {
            let paint = context.out.paint;
            context.out.line(format!(
                "{} {name}  {}  {}",
                paint.green("verified"),
                paint.yellow(&digest.short()),
                paint.dim(&format!(
                    "{}, {} read and hashed{} in {}",
                    count(verified.blobs, "blob"),
                    bytes(verified.bytes),
                    values(&verified),
                    duration(start.elapsed())
                ))
            ))?;
            context.out.flush()?;
        }
        proofs.push(Proof::Whole(verified));
    }
    match (context.json, &args.reference) {
        (true, Some(_)) => proofs.first().map_or(Ok(()), |proof| context.out.json(proof)),
        (true, None) => context.out.json(&proofs),
        (false, _) if proofs.is_empty() => context.out.line("nothing here has a tag"),
        (false, _) => Ok(()),
    }?;
    worst(failures, proofs.len()).map_or(Ok(()), Err)
}

/// What became of a snapshot's proof, as JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Proof {
    Whole(Verified),
    Failed { digest: Digest, name: String, error: ErrorDocument },
}

/// One failure for all: damage goes before what could not be looked at.
fn worst(failures: Vec<Failure>, of: usize) -> Option<Failure> {
    let damage = ErrorCode::CorruptStore.exit_code();
    let count = failures.len();
    let worst = failures.into_iter().max_by_key(|failure| (failure.exit() == damage, failure.exit()))?;
    Some(if of == 1 { worst } else { worst.context(&format!("{count} of {of} snapshots failed; one of them")) })
}

/// What was proven of state tensors beyond their bytes.
fn values(verified: &Verified) -> String {
    match (verified.values_computed, verified.values_attested) {
        (0, 0) => String::new(),
        (n, 0) => format!(", {} recomputed", count(n, "value")),
        (n, attested) => format!(", {} recomputed and {attested} attested", count(n, "value")),
    }
}

/// Every tagged snapshot, with one of its names.
async fn tagged(site: &Site) -> Result<BTreeMap<Digest, String>, Failure> {
    let mut targets = BTreeMap::new();
    for repository in site.repositories().await? {
        for tag in site.tags(&repository.name).await? {
            targets.entry(tag.digest).or_insert_with(|| format!("{}:{}", repository.name, tag.name));
        }
    }
    Ok(targets)
}

async fn local(quiet: bool, store: &Store, digest: Digest) -> Result<Verified, Failure> {
    let seen = Arc::new(Mutex::new(VerifyProgress::default()));
    let standing = || {
        let progress = *seen.lock().unwrap_or_else(PoisonError::into_inner);
        Standing { phase: "reading and hashing".into(), total: progress.total_bytes, done: progress.bytes, deduplicated: 0 }
    };
    let update = seen.clone();
    let mut on_progress = move |progress| *update.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    let work = async { store.verify(&digest, &mut on_progress).await };
    Ok(watch(quiet, standing, work).await?)
}
