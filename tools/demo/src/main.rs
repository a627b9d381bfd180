//! `pf demo`: the whole story on real input. An engine is captured in mid-sentence, forks, and goes
//! on elsewhere bit for bit.
//!
//! Registry, agents and engines are real child processes; the demo calls the library of `pf` as the
//! command does. [`acts`] has the acts, [`script`] the prompts, [`host`] the programs of each host,
//! [`narrator`] the output.

mod acts;
mod damage;
mod engine;
mod host;
mod narrator;
mod processes;
mod prose;
mod report;
mod script;
mod stage;

use acts::Play;
use host::Programs;
use narrator::{Narrator, Told};
use pfr_client::cli::output::Out;
use pfr_client::cli::output::human::{columns, duration, pad};
use pfr_client::cli::{Context, Failure, Global, Program, STYLES};
use processes::service;
use script::Script;
use serde::Serialize;
use stage::Stage;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Show everything with a real model, in under two minutes
#[derive(Debug, clap::Parser)]
#[command(name = "pf demo", bin_name = "pf demo", version, styles = STYLES, max_term_width = 120)]
struct Demo {
    #[command(flatten)]
    global: Global,
    /// Work in this directory and keep it
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    keep: Option<PathBuf>,
    /// The model that runs
    #[arg(long, value_enum, default_value_t = Model::Smollm2)]
    model: Model,
}

/// A model of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Model {
    /// SmolLM2-135M: tells a story; fetched once, 93 MB
    Smollm2,
    /// Random weights and recurrent state: tells numbers; needs no network
    Hybrid,
}

impl Program for Demo {
    fn resume_hint(&self) -> Option<&'static str> {
        Some("everything the demo started has been stopped")
    }

    fn global(&self) -> &Global {
        &self.global
    }

    async fn run(self, context: &mut Context) -> Result<(), Failure> {
        play(context, self).await
    }
}

fn main() -> ExitCode {
    pfr_client::cli::run::<Demo>()
}

/// What `--json` gives.
#[derive(Serialize)]
struct Summary<'a> {
    ok: bool,
    directory: Option<String>,
    seconds: f64,
    steps: &'a [Told],
}

async fn play(context: &mut Context, args: Demo) -> Result<(), Failure> {
    let start = Instant::now();
    // Check that all programs are there before making anything.
    let programs = Programs::find()?;
    let stage = Stage::new(args.keep)?;
    let script = Script::of(args.model);
    let mut narrator = Narrator::new(if context.json { Out::stderr() } else { Out::stdout() });
    let paint = narrator.out().paint;

    narrator.say(&paint.bold("pf: a durable registry for the live state of LLM agents"))?;
    narrator.say(&paint.dim(&format!("three hosts and a registry, all in {}", stage.root().display())))?;

    narrator.step("A registry: one process, one directory")?;
    narrator.command("$", "pf-registry serve --data registry --listen 127.0.0.1:0")?;
    let listen = ["serve", "--data", "registry", "--listen", "127.0.0.1:0"];
    let (registry, url) = service(&programs.registry, stage.root(), "registry", &listen).await?;
    narrator.result(&format!("listening on {url}"))?;
    narrator.command("$", &format!("export PF_REGISTRY={url} PF_AGENT_REGISTRY={url}"))?;

    let mut play = Play { narrator: &mut narrator, stage: &stage, script: &script, programs: &programs, url: &url, quiet: context.quiet };
    let played = play.all().await;
    if let Err(failure) = played {
        let step = narrator.current().unwrap_or_default().to_owned();
        return Err(failure.context(&format!("demo, at {step:?}")));
    }
    registry.stop().await?;

    narrator.say("")?;
    narrator.say(&format!("{} in {}; everything has been stopped.", paint.green("All of it held"), duration(start.elapsed())))?;
    epilogue(&mut narrator, &stage, &script)?;
    if context.json {
        let directory = stage.kept().then(|| stage.root().display().to_string());
        let seconds = start.elapsed().as_secs_f64();
        context.out.json(&Summary { ok: true, directory, seconds, steps: narrator.told() })?;
    }
    Ok(())
}

fn epilogue(narrator: &mut Narrator, stage: &Stage, script: &Script) -> Result<(), Failure> {
    let mut next = if stage.kept() {
        vec![
            (format!("pf-registry serve --data {}", stage.at("registry").display()), "the demo's registry again"),
            ("pf stats agent/main".into(), "look around in it"),
        ]
    } else {
        vec![
            ("pf demo --keep DIR".into(), "the same, and keep everything to look at"),
            if script.is_text() {
                ("pf demo --model hybrid".into(), "the same with recurrent state")
            } else {
                ("pf demo".into(), "the same with a model that tells a story")
            },
        ]
    };
    next.extend([
        ("pf-agent serve --registry URL".into(), "an agent for your own engines: docs/capture.md"),
        ("pf --help".into(), "everything else"),
    ]);
    let widest = next.iter().map(|(command, _)| columns(command)).max().unwrap_or(0);
    let paint = narrator.out().paint;
    narrator.say("\nNext:")?;
    next.iter().try_for_each(|(command, why)| narrator.say(&format!("  {}  {}", pad(command, widest), paint.dim(why))))
}
