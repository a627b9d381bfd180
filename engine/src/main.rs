//! `pf-kv`: an engine for the demo, tests and benchmarks. It writes snapshot directories of real or
//! generated KV pages, and serves: a process that a capture agent attaches to.

use clap::{Args, Parser, Subcommand, ValueEnum};
use pfr_engine::blocks::Placement;
use pfr_engine::compute::{Core, Dense};
use pfr_engine::dump::{Written, write_snapshot_dir};
use pfr_engine::hybrid::Hybrid;
use pfr_engine::serve;
use pfr_engine::synthetic::{Session, write_synthetic_dir};
use pfr_engine::text::{SEQUENCE_TOKENS, corpus};
use pfr_engine::tinyllama::{Source, write_tinyllama_dir, write_tinyllama_fork};
use pfr_engine::wheel::{MODEL_BYTES, MODEL_FILE};
use pfr_engine::{Engine, EngineError, Options, PAGE_TOKENS, Sampler, SeqId, default_cache_dir, locate_model};
use pfr_schema::engine::Verb;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A small deterministic engine: writes snapshot directories (page_manifest.json and blobs/), or
/// serves.
#[derive(Parser)]
#[command(name = "pf-kv", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A generated session without a model: pages of seeded noise in SmolLM2's shape, with tokens
    /// and configuration.
    #[command(after_help = SYNTHETIC)]
    Synthetic(Synthetic),
    /// The KV cache of SmolLM2-135M over some text, and forks of it.
    Smollm2(Smollm2),
    /// Any number of pages of TinyLlama's shape, filled with head vectors from a SmolLM2 cache.
    Tinyllama(Tinyllama),
    /// An engine process with its state in shared memory, for a capture agent; driven by JSON lines
    /// on standard input.
    #[command(after_long_help = serve::HELP)]
    Serve(Serve),
}

const SYNTHETIC: &str = "The same seed gives the same session: with more --tokens it has grown, and the pages before are the same. \
Sessions of different --branch share everything before the token --branch-at.";

#[derive(Args)]
struct Synthetic {
    /// Directory to write; must not hold a snapshot yet.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Tokens of the session: 16 a page, 23,040 bytes of K and V each.
    #[arg(long, value_name = "N", default_value_t = 512)]
    tokens: usize,
    /// Which session.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Which continuation of the common beginning; 0 is the session itself.
    #[arg(long, value_name = "N", default_value_t = 0)]
    branch: u64,
    /// The first token that differs between branches; 0 = they share nothing.
    #[arg(long, value_name = "TOKEN", default_value_t = 0)]
    branch_at: usize,
}

#[derive(Args)]
struct Common {
    /// Directory to write; must not hold a snapshot yet.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Text for the model, which generates more after its end. Default: built-in prose.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the model file is kept. Default: $PF_CACHE, $XDG_CACHE_HOME/pf or ~/.cache/pf.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Threads to compute with; the result does not depend on it. 0 = all.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

#[derive(Args)]
struct Smollm2 {
    #[command(flatten)]
    common: Common,
    /// Tokens of the text, in sequences of at most 2,048.
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Forks of the last sequence, each continued on its own.
    #[arg(long, default_value_t = 0)]
    forks: u32,
    /// Tokens each fork is continued by.
    #[arg(long, default_value_t = 64)]
    fork_tokens: usize,
    /// Shuffle the physical blocks with this seed; the directory does not depend on it.
    #[arg(long, value_name = "SEED")]
    placement: Option<u64>,
}

#[derive(Args)]
struct Tinyllama {
    #[command(flatten)]
    common: Common,
    /// Pages to write: 180,224 bytes of K and as many of V each.
    #[arg(long, default_value_t = 128)]
    pages: usize,
    /// Tokens of the SmolLM2 cache the vectors are taken from.
    #[arg(long, default_value_t = 2048)]
    tokens: usize,
    /// Also write a fork whose last PERCENT % of pages are new; needs --fork-out.
    #[arg(long, value_name = "PERCENT", requires = "fork_out")]
    fork_percent: Option<f64>,
    /// Directory of the fork. It shares blobs with --out by hard links.
    #[arg(long, value_name = "DIR", requires = "fork_percent")]
    fork_out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ModelKind {
    /// SmolLM2-135M-Instruct: full attention, real weights.
    Smollm2,
    /// Linear, full and sliding-window attention with random weights.
    Hybrid,
}

#[derive(Args)]
struct Serve {
    /// The model.
    #[arg(long, value_enum, default_value = "smollm2")]
    model: ModelKind,
    /// Socket of the capture agent. It need not be there yet, and may come back.
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
    /// Name under which the engine registers.
    #[arg(long, default_value = "engine")]
    name: String,
    /// Blocks in each group.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    blocks: u32,
    /// Shuffle the physical blocks with this seed; results do not depend on it.
    #[arg(long, value_name = "SEED")]
    placement: Option<u64>,
    /// Fill memory, and every block that becomes free, with garbage from this seed; results do not
    /// depend on it.
    #[arg(long, value_name = "SEED")]
    dirty: Option<u64>,
    /// Threads for prompts; results do not depend on it. 0 = all.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Seed of the hybrid's weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A field to add to the engine configuration, or to replace in it. The value is JSON,
    /// otherwise text.
    #[arg(long, value_name = "KEY=VALUE", value_parser = deployment)]
    deployment: Vec<(String, serde_json::Value)>,
    /// Number of ranks to claim.
    #[arg(long, value_name = "N", default_value_t = 1)]
    world: u32,
    /// Rank to claim.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    rank_override: u32,
    /// Do not serve a verb: pause, table, pin, oracle or allocate.
    #[arg(long, value_name = "VERB", value_parser = verb)]
    no_verb: Vec<Verb>,
    /// Tenant salt of sequences opened here.
    #[arg(long, default_value = "")]
    salt: String,
    /// Adapter of sequences opened here.
    #[arg(long)]
    adapter: Option<String>,
    /// Where the model file is kept. Default: $PF_CACHE, $XDG_CACHE_HOME/pf or ~/.cache/pf.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

fn deployment(text: &str) -> Result<(String, serde_json::Value), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

fn verb(text: &str) -> Result<Verb, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Synthetic(args) => synthetic(&args),
        Command::Smollm2(args) => smollm2(&args),
        Command::Tinyllama(args) => tinyllama(&args),
        Command::Serve(args) => serve(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pf-kv: {error}");
            // 7 means unreachable, as with pf.
            if matches!(error, EngineError::Download(_)) { ExitCode::from(7) } else { ExitCode::FAILURE }
        }
    }
}

/// Loads the model and fills its cache; `extra` tokens of room are left.
fn fill(common: &Common, tokens: usize, extra: usize, placement: Option<u64>) -> Result<(Engine, Vec<SeqId>), EngineError> {
    let cache_dir = match &common.cache_dir {
        Some(dir) => dir.clone(),
        None => default_cache_dir()?,
    };
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(|source| io("read", path, source));
    let text = common.text.as_ref().map(read).transpose()?;
    let blocks = tokens.div_ceil(PAGE_TOKENS) + tokens.div_ceil(SEQUENCE_TOKENS) + extra;
    let blocks = u32::try_from(blocks).map_err(|_| EngineError::Snapshot(format!("{tokens} tokens are too many")))?;
    let mut engine = Engine::load_with(&locate_model(&cache_dir)?, Options { threads: common.threads, blocks, placement })?;
    let sequences = corpus(&mut engine, text.as_deref(), tokens, common.seed)?;
    Ok((engine, sequences))
}

fn synthetic(args: &Synthetic) -> Result<(), EngineError> {
    let Synthetic { tokens, seed, branch, branch_at, .. } = *args;
    report(&args.out, write_synthetic_dir(&args.out, &Session { tokens, seed, branch, branch_at })?)
}

fn smollm2(args: &Smollm2) -> Result<(), EngineError> {
    let extra = (args.fork_tokens.div_ceil(PAGE_TOKENS) + 1) * args.forks as usize;
    let (mut engine, mut sequences) = fill(&args.common, args.tokens, extra, args.placement)?;
    if let Some(parent) = sequences.last().copied() {
        for i in 0..args.forks {
            let fork = engine.fork(parent)?;
            let mut sampler = Sampler::varied(args.common.seed ^ (u64::from(i) + 1) << 32);
            engine.generate_with(fork, args.fork_tokens, &mut sampler, |_| true)?;
            sequences.push(fork);
        }
    }
    report(&args.common.out, write_snapshot_dir(&args.common.out, &engine, &sequences)?)
}

fn tinyllama(args: &Tinyllama) -> Result<(), EngineError> {
    let (engine, sequences) = fill(&args.common, args.tokens, 0, None)?;
    let source = Source::new(&engine, &sequences, args.common.seed)?;
    report(&args.common.out, write_tinyllama_dir(&args.common.out, source, args.pages)?)?;
    if let (Some(percent), Some(dir)) = (args.fork_percent, &args.fork_out) {
        report(dir, write_tinyllama_fork(&args.common.out, dir, source, percent, 1)?)?;
    }
    Ok(())
}

fn serve(args: Serve) -> Result<(), EngineError> {
    let placement = Placement { seed: args.placement, dirty: args.dirty };
    let core: Box<dyn Core> = match args.model {
        ModelKind::Hybrid => Box::new(Hybrid::new(args.seed, args.blocks, placement)?),
        ModelKind::Smollm2 => {
            let cache_dir = args.cache_dir.map_or_else(default_cache_dir, Ok)?;
            if !cache_dir.join(MODEL_FILE).is_file() {
                let line = serde_json::json!({"fetching": {"bytes": MODEL_BYTES}});
                writeln!(std::io::stdout(), "{line}").map_err(|source| io("write", Path::new("standard output"), source))?;
            }
            let model = locate_model(&cache_dir)?;
            let threads = if args.threads > 0 { args.threads } else { std::thread::available_parallelism().map_or(1, usize::from) };
            Box::new(Dense::load(&model, threads, args.blocks, placement)?)
        }
    };
    let all = serve::Options::default().verbs;
    let options = serve::Options {
        agent: args.agent,
        name: args.name,
        verbs: all.into_iter().filter(|verb| !args.no_verb.contains(verb)).collect(),
        world: args.world,
        rank: args.rank_override,
        deployment: args.deployment.into_iter().collect(),
        salt: args.salt,
        adapter: args.adapter,
    };
    serve::run(core, options, BufReader::new(std::io::stdin()), std::io::stdout())
}

fn report(dir: &Path, written: Written) -> Result<(), EngineError> {
    let Written { pages, blobs, bytes } = written;
    let line = format!("{}: {pages} pages, {blobs} blobs written, {bytes} bytes", dir.display());
    writeln!(std::io::stdout(), "{line}").map_err(|source| io("write", Path::new("standard output"), source))
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> EngineError {
    EngineError::Io { action, path: path.to_owned(), source }
}
