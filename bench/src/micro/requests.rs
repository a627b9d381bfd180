//! Requests whose time must not grow with the store: forks and their statistics, `match` among very
//! many snapshots, `tag~N`.

use super::{line, timed};
use crate::Result;
use crate::gc::rows::{LEASE, PAGE_BYTES, Rows};
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
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `requests`.
#[derive(clap::Args)]
pub struct Args {
    /// Forks of an agent that has 300 page chunks of 256 page blobs
    #[arg(long, default_value_t = 1000)]
    forks: u64,
    /// Snapshots in the prefix index
    #[arg(long, default_value_t = 1_000_000)]
    prefixes: usize,
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

/// Measures each request and prints a line for it.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk)]);
    println!("{machine}\n");
    println!("| what | median | min–max |\n|---|---|---|");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let dir = tempfile::tempdir_in(&disk)?;
        let metadata: Arc<dyn Metadata> = match &args.database {
            None => SqliteMetadata::open(&dir.path().join("metadata.sqlite"), Clock::system()).await?,
            Some(url) => PostgresMetadata::connect(url, PostgresOptions::default()).await?,
        };
        let (packs, _) = pfr_store::storage::open_dir(&dir.path().join("packs"))?;
        let store = Store::new(packs, Arc::clone(&metadata), Options::default());
        let statistics = statistics(&store, &*metadata, args).await?;
        let forks = forks(&store, args).await?;
        let slowest = matches(&store, &*metadata, args).await?;
        ancestors(&store, &*metadata, args).await?;
        // The goals are for this size, on SQLite.
        if args.database.is_none() && args.forks >= 1000 && args.prefixes >= 1_000_000 {
            println!(
                "\n{}",
                goals::render(&goals::of_facts(&[(Fact::Statistics, statistics), (Fact::Forks, forks), (Fact::Match, slowest)]))
            );
        }
        Ok(())
    })
}

/// The agent whose forks have statistics.
const FORKED: &str = "bench/forks";

/// Returns the median, in milliseconds.
async fn statistics(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<f64> {
    let repository: RepositoryName = FORKED.parse()?;
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
    }
    Ok(all)
}

async fn ancestors(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<()> {
    let repository: RepositoryName = "bench/chain".parse()?;
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

/// Returns the slowest median of a whole request, in milliseconds.
async fn matches(store: &Store, metadata: &dyn Metadata, args: &Args) -> Result<f64> {
    let many: RepositoryName = "bench/many".parse()?;
    snapshots(metadata, &many, args.prefixes, false).await?;
    let (mut after, mut number, mut of_agent) = (0, 0, path(tokens(0, 0)));
    loop {
        let found = metadata.unprefixed(after, BATCH).await?;
        let Some(last) = found.last() else { break };
        after = last.0;
        let mut marks = Vec::with_capacity(found.len());
        for (id, _) in &found {
            let (agent, step) = (number / STEPS, number % STEPS);
            if step == 0 {
                of_agent = path(tokens(u32::try_from(agent)?, COMMON));
            }
            marks.push((*id, PrefixMark::of(&key(&of_agent, length(step)), Some(&of_agent), &fingerprint())));
            number += 1;
        }
        metadata.index_prefixes(marks).await?;
    }
    let (mut hashing, stranger) = (Vec::new(), u32::try_from(args.prefixes / STEPS)? + 1);
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
        line(&format!("search among {} prefixes for {TOKENS} tokens: {what}", args.prefixes), &times, "ms");
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
