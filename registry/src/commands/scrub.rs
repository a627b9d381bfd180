//! `pf-registry scrub`: finds damaged blobs and fetches them again from another registry.

use super::Settings;
use super::tool::{NAMED, Which, lines, on_store, print};
use crate::{Error, mirror};
use clap::Args;
use pfr_client::human::{bytes, count};
use pfr_client::{ByteSize, Remote, RemoteOptions, scrub_rate};
use pfr_schema::api::{DamagedBlob, ScrubReport};
use pfr_schema::{Digest, ErrorCode, Kind, RepositoryName};
use pfr_service::{Secret, few};
use pfr_store::{ScrubOptions, Store};
use std::collections::{BTreeMap, BTreeSet};

/// Digests in one request to the other registry.
const BATCH: usize = 1000;

/// Arguments of `scrub`.
#[derive(Args)]
pub(crate) struct Scrub {
    /// Decode and hash every blob. Without this, compare only checksums.
    #[arg(long)]
    full: bool,
    /// Read at most this much per second, such as 100MB.
    #[arg(long, value_name = "SIZE", value_parser = scrub_rate)]
    rate: Option<ByteSize>,
    /// Another registry that has the same snapshots, to fetch damaged blobs from.
    #[arg(long, value_name = "URL")]
    heal_from: Option<String>,
    /// Token for that registry.
    #[arg(long, value_name = "TOKEN", env = "PF_REGISTRY_HEAL_TOKEN", hide_env_values = true, requires = "heal_from")]
    heal_token: Option<Secret>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: Scrub) -> Result<(), Error> {
    let config = args.settings.load()?;
    let mirror = args.heal_from.as_deref().map(|url| {
        let (token, token_over_http, extra_roots) = (args.heal_token, config.token_over_http, config.extra_roots());
        Remote::new(url, RemoteOptions { token, token_over_http, extra_roots, ..RemoteOptions::default() })
    });
    let mirror = mirror.transpose().map_err(mirror::Error::from)?;
    let options = ScrubOptions { full: args.full, bytes_per_second: args.rate.map(|rate| rate.0) };
    let (report, healing) = on_store(&config, &args.which, async |store| {
        let mut report = store.scrub(&options, &mut |_| ()).await.map_err(Error::Work)?;
        let mut healing = Ok(());
        if let Some(mirror) = &mirror
            && !report.damaged.is_empty()
        {
            healing = heal(&store, mirror, &report.damaged).await;
            let left = store.damaged().await.map_err(Error::Work)?;
            let before = std::mem::replace(&mut report.damaged, left);
            let still: BTreeSet<Digest> = report.damaged.iter().map(|blob| blob.digest).collect();
            report.healed = before.iter().filter(|blob| !still.contains(&blob.digest)).count() as u64;
        }
        Ok((report, healing))
    })?;
    // The report is printed even if healing failed.
    print(&report, args.json, text);
    healing?;
    if report.damaged.is_empty() && report.bad_packs.is_empty() {
        return match report.unread.len() {
            0 => Ok(()),
            unread => {
                let unread = count(unread as u64, "pack");
                let reason = format!("{unread} could not be read, so it is not known whether their blobs are good: run the scrub again");
                Err(Error::Work(pfr_store::Error::Unavailable { what: "packs", reason }))
            }
        };
    }
    let found = [(report.damaged.len(), "damaged blob"), (report.bad_packs.len(), "bad pack")];
    let found: Vec<String> = found.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| count(n as u64, what)).collect();
    Err(Error::Found(found.join(" and ")))
}

/// Fetches damaged blobs, repository by repository: another repository may have a blob that the
/// first one lacks.
async fn heal(store: &Store, mirror: &Remote, damaged: &[DamagedBlob]) -> Result<(), Error> {
    let kinds = kinds(store, damaged).await?;
    let mut of: BTreeMap<RepositoryName, BTreeSet<(Kind, Digest)>> = BTreeMap::new();
    for blob in damaged {
        let names = blob.snapshots.iter().filter_map(|name| name.split_once('@')?.0.parse::<RepositoryName>().ok());
        for repository in names {
            // Sorted by kind, so that children come before the nodes that list them.
            of.entry(repository).or_default().insert((kinds.get(&blob.digest).copied().unwrap_or(Kind::Blob), blob.digest));
        }
    }
    let mut result = Ok(());
    'repositories: for (repository, wanted) in of {
        let wanted: Vec<Digest> = wanted.into_iter().map(|(_, digest)| digest).collect();
        for batch in wanted.chunks(BATCH) {
            match fetch(store, mirror, &repository, batch).await {
                Ok(Next::Batch) => {}
                Ok(Next::Repository) => break,
                Err(error) => {
                    result = Err(error);
                    break 'repositories;
                }
            }
        }
    }
    // After an error too: the blobs that arrived may have completed nodes.
    store.reassess().await.map_err(Error::Work)?;
    result
}

async fn kinds(store: &Store, damaged: &[DamagedBlob]) -> Result<BTreeMap<Digest, Kind>, Error> {
    let digests = damaged.iter().map(|blob| blob.digest).collect();
    let rows = store.metadata().find(digests).await.map_err(Error::Work)?;
    Ok(rows.into_iter().flatten().map(|row| (row.digest, row.kind)).collect())
}

/// What to request after a batch.
enum Next {
    Batch,
    Repository,
}

/// Fetches blobs of one repository; if that fails, one by one. An error ends the healing: it would
/// concern every other blob too.
async fn fetch(store: &Store, mirror: &Remote, repository: &RepositoryName, digests: &[Digest]) -> Result<Next, Error> {
    let reason = match mirror.frames(repository, digests.to_vec(), store.options().codecs).await {
        Ok(frames) => match store.heal(repository, digests, frames).await {
            Ok(_) => return Ok(Next::Batch),
            // The error is about our own store.
            Err(error @ (pfr_store::Error::Unavailable { .. } | pfr_store::Error::NotPermitted { .. } | pfr_store::Error::Full(_))) => {
                return Err(Error::Work(error));
            }
            Err(error) => error.to_string(),
        },
        Err(error) => match error.code() {
            ErrorCode::RepositoryUnknown | ErrorCode::Denied => {
                tracing::warn!(%error, %repository, "heal: the other registry has no such repository, or denies access");
                return Ok(Next::Repository);
            }
            ErrorCode::Unauthorized => return Err(Error::OtherRegistry(error.to_string())),
            code if error.retryable() || code.retryable() => return Err(Error::OtherRegistry(error.to_string())),
            _ => error.to_string(),
        },
    };
    if let [digest] = digests {
        tracing::warn!(reason, %repository, %digest, "heal: the other registry has no good copy of this blob");
        return Ok(Next::Batch);
    }
    for digest in digests {
        if let Next::Repository = Box::pin(fetch(store, mirror, repository, std::slice::from_ref(digest))).await? {
            return Ok(Next::Repository);
        }
    }
    Ok(Next::Batch)
}

fn text(r: &ScrubReport) -> String {
    let how = if r.full { "hashed" } else { "compared with checksums" };
    let damaged: Vec<String> = r
        .damaged
        .iter()
        .map(|blob| {
            let reached = if blob.snapshots.is_empty() { "no snapshot reaches it".into() } else { few(&blob.snapshots, NAMED) };
            format!("{}: {}; {reached}", blob.digest, blob.reason)
        })
        .collect();
    let healed = if r.healed > 0 { format!("healed    {}\n", count(r.healed, "blob")) } else { String::new() };
    format!("scrubbed  {}, {}, {}, {how}\n{healed}", count(r.packs, "pack"), count(r.frames, "blob"), bytes(r.bytes))
        + &lines("bad pack", &r.bad_packs)
        + &lines("dead    ", &r.dead_frames)
        + &lines("unread  ", &r.unread)
        + &lines("damaged ", &damaged)
}
