//! Requests whose time must not grow with the store: forks and their statistics, `match` among very
//! many snapshots, `tag~N`.

use super::{line, timed};
use crate::Result;
use crate::gc::rows::{LEASE, PAGE_BYTES, Rows};
use crate::gc::straight::{Listing, fill_prefixes};
use crate::goals::{self, Fact};
use crate::machine::describe;
use bytes::Bytes;
use pfr_schema::api::MatchRequest;
use pfr_schema::checkpoint::Key;
use pfr_schema::codec::Codec;
use pfr_schema::container::Child;
use pfr_schema::frame::{self, Header};
use pfr_schema::journal::Record;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::{Digest, Document, Kind, RepositoryName, Selector, Tag, media_type, prefix};
use pfr_store::{Clock, Metadata, NewContainer, NewFrame, Options, PackSizes, PostgresMetadata, PostgresOptions, PrefixMark, PrefixPath};
use pfr_store::{PushId, SqliteMetadata, Store, document_frame};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Arguments of `requests`.
#[derive(clap::Args)]
pub struct Args {
    /// Forks of an agent that has 300 page chunks of 256 page blobs
    #[arg(long, default_value_t = 1000)]
    forks: u64,
    /// Snapshots in the prefix index
    #[arg(long, default_value_t = 1_000_000)]
    snapshots: usize,
    /// Snapshots in a chain, each the parent of the next
    #[arg(long, default_value_t = 10_001)]
    chain: usize,
    /// Rounds; the tables show the median
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Directory on disk to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// An empty PostgreSQL database, instead of SQLite
    #[arg(long)]
    database: Option<String>,
}

/// Tokens of a request.
const TOKENS: u32 = 380_000;
/// Tokens at the beginning that all agents have in common.
const COMMON: u32 = 16_000;
/// Snapshots of an agent.
const STEPS: usize = 1000;
/// Snapshots restored or indexed in one transaction.
const BATCH: usize = 5000;
/// The repository whose snapshots are in the prefix index.
const MANY: &str = "bench/many";

/// Measures each request and prints a line for it.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk)]);
    println!("{machine}\n");
    println!("| what | median | min–max |\n|---|---|---|");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let dir = tempfile::tempdir_in(&disk)?;
        let (metadata, store) = open(dir.path(), args.database.as_deref()).await?;
        let statistics = statistics(&store, &*metadata, args).await?;
        let forks = forks(&store, args).await?;
        ancestors(&store, &*metadata, args).await?;
        let start = Instant::now();
        eprintln!("making {} snapshots for match", args.snapshots);
        let (metadata, store) = match &args.database {
            Some(_) => {
                through_transactions(&*metadata, args.snapshots).await?;
                (metadata, store)
            }
            None => {
                let metadata = straight(&dir.path().join("prefixes.sqlite"), args.snapshots).await?;
                let store = beside(&dir.path().join("packs-of-prefixes"), &metadata).await?;
                (metadata, store)
            }
        };
        eprintln!("they took {:.0} s", start.elapsed().as_secs_f64());
        let slowest = matches(&store, &*metadata, args).await?;
        // The goals are for this size, on SQLite.
        if args.database.is_none() && args.forks >= 1000 && args.snapshots >= 1_000_000 {
            println!(
                "\n{}",
                goals::render(&goals::of_facts(&[(Fact::Statistics, statistics), (Fact::Forks, forks), (Fact::Match, slowest)]))
            );
        }
        Ok(())
    })
}

/// Tables in a file below `dir`, or in this PostgreSQL database, and a store over them.
async fn open(dir: &Path, database: Option<&str>) -> Result<(Arc<dyn Metadata>, Store)> {
    let metadata: Arc<dyn Metadata> = match database {
        None => SqliteMetadata::open(&dir.join("metadata.sqlite"), Clock::system()).await?,
        Some(url) => PostgresMetadata::connect(url, PostgresOptions::default()).await?,
    };
    let store = beside(&dir.join("packs"), &metadata).await?;
    Ok((metadata, store))
}

/// The agent whose forks have statistics.
const FORKED: &str = "bench/forks";

/// Returns the median, in milliseconds.
async fn statistics(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<f64> {
    let repository: RepositoryName = FORKED.parse()?;
    eprintln!("making an agent and {} forks", args.forks);
    let mut rows = Rows::new(metadata, 1);
    let (mut runs, mut last) = (Vec::new(), Vec::new());
    for _ in 0..300 {
        last = rows.pages(128);
        runs.push(rows.run(&last));
    }
    let base = rows.commit(&repository, &runs, None, None).await?;
    runs.pop();
    for _ in 0..args.forks {
        // The last page chunk of the agent, with eight other pages at its end.
        let new = rows.pages(8);
        let mut forked = runs.clone();
        forked.push(rows.run(&[&last[..240], &new].concat()));
        rows.commit(&repository, &forked, Some(base), None).await?;
    }
    let mut times = Vec::new();
    for _ in 0..args.rounds {
        let (took, stats) = timed(store.stats(Some(&repository))).await?;
        times.push(took * 1e3);
        let fork = stats.snapshots.last().ok_or("no snapshot")?;
        if stats.snapshots.len() as u64 != args.forks + 1 || fork.exclusive / PAGE_BYTES != 16 {
            return Err(format!("{} bytes are only in the fork, {} snapshots", fork.exclusive, stats.snapshots.len()).into());
        }
    }
    Ok(line(&format!("statistics of {} forks of 76,800 page blobs in 300 page chunks", args.forks), &times, "ms"))
}

/// Forks the agent into 12, as a request does: until the journal has it. Returns the median, in
/// milliseconds.
async fn forks(store: &Store, args: &Args) -> Result<f64> {
    let repository: RepositoryName = FORKED.parse()?;
    let agent = store.stats(Some(&repository)).await?.snapshots.first().ok_or("no snapshot")?.digest;
    // Those that have statistics were committed without it.
    store.flush_journal().await?;
    let mut times = Vec::new();
    for round in 0..args.rounds {
        let (took, _) = timed(store.fork(&repository, agent, &format!("try-{round}"), 12)).await?;
        times.push(took * 1e3);
    }
    Ok(line("a fork into 12, of 76,800 page blobs", &times, "ms"))
}

/// Makes `count` snapshots without pages. In a chain, the parent of each is the one before it.
async fn snapshots(metadata: &dyn Metadata, repository: &RepositoryName, count: usize, chain: bool) -> Result<Vec<Digest>> {
    let digest = |number: usize| Digest::sha256(format!("{repository} {number}").as_bytes());
    let header = |digest, kind| Header { codec: Codec::Raw, kind, digest, raw_len: 600, stored_len: 600 };
    let config = digest(usize::MAX);
    let children = vec![Child { digest: config, kind: Kind::Blob, size: Some(600), shape: None, optional: false }];
    let push = PushId(uuid::Uuid::now_v7().to_string());
    metadata.open_push(push.clone(), repository.clone(), LEASE).await?;
    let all: Vec<Digest> = (0..count).map(digest).collect();
    for (batch, part) in all.chunks(BATCH).enumerate() {
        let manifest = |digest: &Digest| {
            let container = NewContainer { children: children.clone(), shape: None };
            NewFrame { header: header(*digest, Kind::Manifest), offset: 8, container: Some(container) }
        };
        let mut frames = vec![NewFrame { header: header(config, Kind::Blob), offset: 8, container: None }];
        frames.extend(part.iter().map(manifest));
        let pack = metadata.begin_pack(uuid::Uuid::now_v7().to_string(), LEASE).await?;
        metadata.finish_pack(push.clone(), pack, PackSizes { bytes: 4 << 20, frame_bytes: 4 << 20 }, frames, LEASE).await?;
        let record = |(at, manifest): (usize, &Digest)| Record::Snapshot {
            repository: repository.clone(),
            manifest: *manifest,
            parents: (batch * BATCH + at).checked_sub(1).filter(|_| chain).map(digest).into_iter().collect(),
            artifact_type: None,
            subject: None,
            at: 1,
            new_bytes: 0,
        };
        metadata.restore_names(part.iter().enumerate().map(record).collect(), 1).await?;
        eprintln!("{} of {count} snapshots are made", batch * BATCH + part.len());
    }
    Ok(all)
}

async fn ancestors(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<()> {
    let repository: RepositoryName = "bench/chain".parse()?;
    eprintln!("making a chain of {} snapshots", args.chain);
    let chain = snapshots(metadata, &repository, args.chain, true).await?;
    let (first, last) = (chain[0], chain[chain.len() - 1]);
    let tag: Tag = "last".parse()?;
    let record = Record::Tag { repository: repository.clone(), tag: tag.clone(), manifest: last, at: 1 };
    metadata.restore_names(vec![record], 1).await?;
    let back = u32::try_from(chain.len() - 1)?;
    let (mut resolve, mut lineage) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        let (took, found) = timed(store.resolve(&repository, &Selector::Tag { tag: tag.clone(), back })).await?;
        resolve.push(took * 1e3);
        if found != first {
            return Err("tag~N is not the first".into());
        }
        let (took, _) = timed(store.lineage(&repository, &last, 10_000)).await?;
        lineage.push(took * 1e3);
    }
    line(&format!("tag~{back}"), &resolve, "ms");
    line("lineage of 10,000 snapshots", &lineage, "ms");
    Ok(())
}

/// The tokens of an agent: those of agent 0 up to position `leaves`, then its own.
fn tokens(agent: u32, leaves: u32) -> Vec<u32> {
    (0..TOKENS).map(|i| if i < leaves { i } else { i ^ (agent << 20) }).collect()
}

fn fingerprint() -> Digest {
    Digest::sha256(b"engine")
}

fn path(tokens: Vec<u32>) -> PrefixPath {
    PrefixPath::new(tokens, &fingerprint(), "", None)
}

fn key(path: &PrefixPath, tokens: u64) -> Key {
    let prefix = path.key(tokens).unwrap_or_else(fingerprint);
    Key { scheme: prefix::SCHEME.into(), prefix, tokens, alignment: 1, salt: String::new(), adapter: None }
}

/// The prefix length of an agent's snapshot number `step`.
fn length(step: usize) -> u64 {
    let own = u64::from(TOKENS - COMMON);
    u64::from(COMMON) + (step as u64 + 1) * own / (STEPS as u64 + 1)
}

/// The snapshots of agents, one agent after the other, `count` in all.
fn listings(count: usize) -> impl Iterator<Item = Listing> {
    let mut of_agent = path(Vec::new());
    (0..count).map(move |number| {
        let (agent, step) = (number / STEPS, number % STEPS);
        if step == 0 {
            of_agent = path(tokens(agent as u32, COMMON));
        }
        let key = key(&of_agent, length(step));
        Listing { tokens: key.tokens, marks: PrefixMark::of(&key, Some(&of_agent), &fingerprint()) }
    })
}

/// A store of rows that were written without it. Its storage gets the marker here, which commits
/// write before the first pack. Tables without an id would refuse a storage that has none of their
/// packs.
async fn beside(path: &Path, metadata: &Arc<dyn Metadata>) -> Result<Store> {
    let (packs, _) = pfr_store::storage::open_dir(path)?;
    metadata.enter_storage_id(uuid::Uuid::now_v7().to_string()).await?;
    std::fs::write(path.join("pf-store"), "")?;
    Ok(Store::new(packs, Arc::clone(metadata), Options::default()))
}

/// Makes a database with these snapshots, as their commits would have left it. Transactions take
/// longer: each snapshot writes to places of the index that no other one of its transaction writes
/// to, and their pages are read, logged and copied once for each transaction.
async fn straight(path: &Path, count: usize) -> Result<Arc<dyn Metadata>> {
    drop(SqliteMetadata::open(path, Clock::system()).await?);
    fill_prefixes(path, MANY, count, listings(count))?;
    Ok(SqliteMetadata::open(path, Clock::system()).await?)
}

/// Makes the snapshots as a rebuild does, and then their rows in the prefix index.
async fn through_transactions(metadata: &dyn Metadata, count: usize) -> Result<()> {
    snapshots(metadata, &MANY.parse()?, count, false).await?;
    let (mut after, mut done, mut all) = (0, 0, listings(count));
    loop {
        let found = metadata.unprefixed(after, BATCH).await?;
        let Some(last) = found.last() else { return Ok(()) };
        after = last.0;
        let marks: Vec<(i64, Vec<PrefixMark>)> = found.iter().zip(all.by_ref()).map(|((id, _), one)| (*id, one.marks)).collect();
        done += marks.len();
        metadata.index_prefixes(marks).await?;
        eprintln!("{done} of {count} snapshots are in the prefix index");
    }
}

/// Returns the slowest median of a whole request, in milliseconds.
async fn matches(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<f64> {
    let many: RepositoryName = MANY.parse()?;
    let (mut hashing, stranger) = (Vec::new(), u32::try_from(args.snapshots / STEPS)? + 1);
    for (what, asked, hit) in [
        ("a hit, the last snapshot of an agent", tokens(0, COMMON), true),
        ("a hit, a snapshot in the middle of an agent", tokens(stranger, TOKENS / 2), true),
        ("a miss after the common beginning", tokens(stranger, COMMON), false),
        ("a miss, no token in common", tokens(stranger, 0), false),
    ] {
        let mut times = Vec::new();
        for _ in 0..args.rounds {
            let (took, path) = timed(async { Ok(path(asked.clone())) }).await?;
            hashing.push(took * 1e3);
            let (took, hits) = timed(metadata.find_prefixes(many.clone(), Arc::new(path), None, usize::MAX)).await?;
            times.push(took * 1e3);
            if hits.deepest.is_empty() == hit {
                return Err(format!("{what}: found {hits:?}").into());
            }
        }
        line(&format!("search among {} snapshots for {TOKENS} tokens: {what}", args.snapshots), &times, "ms");
    }
    line(&format!("prefix keys of {TOKENS} tokens"), &hashing, "ms");
    // Snapshots with their bytes, since `match` reads the manifest that it finds. The same index
    // has them.
    let few: RepositoryName = "bench/few".parse()?;
    let asked = tokens(0, COMMON);
    for step in 0..16 {
        push(store, &few, &asked[..usize::try_from(length(STEPS - 20 + step))?]).await?;
    }
    let mut slowest: f64 = 0.0;
    for (what, tokens, hit) in [("hit", asked, true), ("miss", tokens(stranger, COMMON), false)] {
        let request = MatchRequest { tokens, fingerprint: fingerprint(), salt: String::new(), adapter: None };
        let mut times = Vec::new();
        for _ in 0..args.rounds {
            let (took, found) = timed(store.match_prefix(&few, &request)).await?;
            times.push(took * 1e3);
            if found.digest.is_some() != hit {
                return Err(format!("{what}: {found:?}").into());
            }
        }
        slowest = slowest.max(line(&format!("match of {TOKENS} tokens, the whole request, {what}"), &times, "ms"));
    }
    Ok(slowest)
}

/// Pushes a snapshot that has tokens and no pages.
async fn push(store: &Store, repository: &RepositoryName, tokens: &[u32]) -> Result<()> {
    let path = path(tokens.to_vec());
    let prefix = Some(key(&path, tokens.len() as u64));
    let config = SnapshotConfig { fingerprint: Some(fingerprint()), prefix, ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let list = Document::new(Kind::Blob, tokens.iter().flat_map(|token| token.to_le_bytes()).collect());
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TOKENS, &list)], BTreeMap::new()).to_document();
    let mut frames: Vec<Bytes> = [&config, &list, &manifest].map(document_frame).into();
    frames.push(frame::end_mark(frames.len() as u64).into());
    let session = store.open_push(repository).await?;
    store.ingest(&session.id, futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>))).await?;
    store.commit(&session.id, manifest.digest, None, None).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn marks(metadata: &dyn Metadata) -> Vec<Vec<PrefixMark>> {
        let snapshots = metadata.prefixed(0, 10).await.unwrap();
        let marks = snapshots.into_iter().map(|mut snapshot| {
            assert!(snapshot.is_indexed && snapshot.elsewhere == 0, "{snapshot:?}");
            snapshot.marks.sort_unstable();
            snapshot.marks
        });
        marks.collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn rows_that_are_written_straight_are_those_of_commits() {
        let dir = tempfile::tempdir().unwrap();
        let written = straight(&dir.path().join("straight.sqlite"), 3).await.unwrap();
        let audit = written.audit(false).await.unwrap();
        assert_eq!((audit.objects, audit.wrong), (9, 0), "{:?}", audit.discrepancies);
        let committed = SqliteMetadata::open(&dir.path().join("committed.sqlite"), Clock::system()).await.unwrap();
        let (packs, _) = pfr_store::storage::open_dir(&dir.path().join("committed")).unwrap();
        let one_by_one = Store::new(packs, Arc::clone(&committed), Options::default());
        let (many, of_agent): (RepositoryName, _) = (MANY.parse().unwrap(), tokens(0, COMMON));
        for listing in listings(3) {
            push(&one_by_one, &many, &of_agent[..listing.tokens as usize]).await.unwrap();
        }
        assert_eq!(marks(&*written).await, marks(&*committed).await);
        // What is committed afterwards finds its place among them.
        let next = path(of_agent.clone());
        push(&beside(&dir.path().join("straight"), &written).await.unwrap(), &many, &of_agent).await.unwrap();
        let hits = written.find_prefixes(many, Arc::new(next), None, usize::MAX).await.unwrap();
        assert_eq!(hits.deepest.first().map(|hit| hit.tokens), Some(u64::from(TOKENS)));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_of_rows_without_packs_takes_forks_and_pushes() {
        let dir = tempfile::tempdir().unwrap();
        let (metadata, store) = open(dir.path(), None).await.unwrap();
        let many: RepositoryName = MANY.parse().unwrap();
        let made = snapshots(&*metadata, &many, 3, false).await.unwrap();
        store.fork(&many, made[0], "try", 2).await.unwrap();
        push(&store, &many, &tokens(0, COMMON)[..length(0) as usize]).await.unwrap();
    }
}
