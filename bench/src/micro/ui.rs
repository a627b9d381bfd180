//! The pages of a registry for operators, over an agent with very many forks: milliseconds from the
//! request to the last byte, on loopback. The registry is a process of its own, and its store has
//! been asked before.

use super::line;
use crate::Result;
use crate::contender::{http, pf, program};
use crate::goals::{self, Fact};
use crate::machine::describe;
use crate::replicas::said;
use pfr_schema::api::{CommitRequest, Committed, FramesStored, Push};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, Document, media_type};
use pfr_testkit::frames;
use pfr_testkit::snapshot::{Shape, Snapshot};
use reqwest::Client;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `ui`.
#[derive(clap::Args)]
pub struct Args {
    /// Forks of the agent
    #[arg(long, default_value_t = 1000)]
    forks: u64,
    /// Tokens of the agent: 32 a page, and two blobs each
    #[arg(long, default_value_t = 380_000)]
    tokens: u64,
    /// Requests of each page; the table shows the median
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Directory to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The registry [default: pf-registry beside this program]
    #[arg(long, value_name = "FILE")]
    registry: Option<PathBuf>,
}

/// Pages of 128 bytes of K and as many of V: what counts is how many there are.
const SHAPE: Shape = Shape::of(Geometry { page_size_tokens: 32, n_layers: 1, n_heads: 1, head_dim: 2, dtype: Dtype::Bf16 });
/// Pages at the end of each fork that no other one has.
const OWN: u64 = 8;

/// Measures each page and prints a line for it.
pub fn run(args: &Args) -> Result<()> {
    let place = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::tempdir_in(&place)?;
    let machine = describe(&[("disk", &place)]);
    println!("{} × {}, {}; {:?}\n", machine.cores, machine.cpu, machine.kernel, machine.file_systems);
    let program = program(args.registry.as_deref(), "pf-registry")?;
    let data = dir.path().join("registry");
    let (_registry, url) = pf::serve(&program, &["--data".as_ref(), data.as_os_str()])?;
    http::runtime()?.block_on(async {
        let client = Client::builder().no_proxy().build()?;
        let fork = forks(&client, &url, args.tokens, args.forks).await?;
        println!("| page, with {} forks | median | min–max |\n|---|---|---|", args.forks);
        let agent = "/ui/bench%2Fagent";
        let mut slowest: f64 = 0.0;
        for (what, path) in [
            ("overview", "/".to_owned()),
            ("repositories", "/ui/-/repositories".to_owned()),
            ("fork tree, first page", agent.to_owned()),
            ("fork tree, last page", format!("{agent}?page={}", (args.forks + 1).div_ceil(100))),
            ("the snapshot that all forks begin with", format!("{agent}/base")),
            ("a fork", format!("{agent}/{fork}")),
            ("storage", "/ui/-/storage".to_owned()),
            ("background tasks", "/ui/-/tasks".to_owned()),
            ("the API", "/docs".to_owned()),
        ] {
            let address = format!("{url}{path}");
            let mut times = Vec::new();
            for round in 0..=args.rounds {
                let start = Instant::now();
                let answer = client.get(&address).header("accept", "text/html").send().await?.error_for_status()?;
                let page = answer.bytes().await?;
                // The first request finds nothing in the caches of the database.
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
                if !page.ends_with(b"</html>") {
                    return Err(format!("{path} has no end").into());
                }
            }
            slowest = slowest.max(line(what, &times, "ms"));
        }
        // The goal is for this size.
        if args.forks >= 1000 && args.tokens >= 380_000 {
            println!("\n{}", goals::render(&goals::of_facts(&[(Fact::Ui, slowest)])));
        }
        Ok(())
    })
}

/// Pushes an agent of so many tokens and its forks to the repository `bench/agent`, each by itself,
/// as clients do. Returns the digest of the last.
pub async fn forks(client: &Client, url: &str, tokens: u64, forks: u64) -> Result<Digest> {
    let pages = tokens.div_ceil(32).max(OWN);
    let mut numbers: Vec<u64> = (0..pages).collect();
    let mut stored = HashSet::new();
    let base = SHAPE.snapshot(&numbers).build();
    push(client, url, &base, "base", &mut stored).await?;
    let own = numbers.len() - OWN as usize;
    let mut last = base.digest();
    for fork in 0..forks {
        for (number, at) in numbers[own..].iter_mut().zip(0..) {
            *number = pages + fork * OWN + at;
        }
        let made = SHAPE.snapshot(&numbers).parents(vec![base.digest()]).build();
        push(client, url, &made, &format!("fork-{fork}"), &mut stored).await?;
        last = made.digest();
    }
    Ok(last)
}

/// Pushes what is not stored yet, and commits.
async fn push(client: &Client, url: &str, snapshot: &Snapshot, tag: &str, stored: &mut HashSet<Digest>) -> Result<()> {
    let pushes = format!("{url}/v1/repositories/bench%2Fagent/pushes");
    let Push { id, .. } = said(client.post(&pushes)).await?;
    let blobs: Vec<&Document> = snapshot.blobs().into_iter().filter(|blob| stored.insert(blob.digest)).collect();
    let body = frames::stream(blobs.into_iter().map(frames::of));
    let upload = client.put(format!("{pushes}/{id}/frames")).header("content-type", media_type::FRAMES).body(body);
    let _: FramesStored = said(upload).await?;
    let commit = CommitRequest { manifest: snapshot.digest(), tag: Some(tag.parse()?), if_tag_is: None };
    let _: Committed = said(client.post(format!("{pushes}/{id}/commit")).json(&commit)).await?;
    Ok(())
}
