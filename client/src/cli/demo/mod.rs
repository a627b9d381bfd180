//! `pf demo`: the main job on real input. A registry, a model that makes KV pages, two hosts, forks, proof, and a damaged page.
//!
//! Registry and engine are real child processes; pushes and pulls are this crate's own, as a user's would be.
//! [`acts`] is the play, [`cast`] where the pages come from, [`narrator`] what is said about it.

mod acts;
mod carve;
mod cast;
mod compare;
mod narrator;
mod processes;
mod stage;

use super::args::Demo;
use super::context::Context;
use super::failure::Failure;
use super::output::Out;
use super::output::human::{columns, duration, pad};
use acts::Play;
use cast::Cast;
use narrator::{Narrator, Told};
use processes::{Registry, sibling};
use serde::Serialize;
use stage::Stage;
use std::time::Instant;

/// What `--json` gives.
#[derive(Serialize)]
struct Summary<'a> {
    ok: bool,
    directory: Option<String>,
    seconds: f64,
    steps: &'a [Told],
}

pub async fn run(context: &mut Context, args: Demo) -> Result<(), Failure> {
    let start = Instant::now();
    // Everything that can be missing is looked for before anything is made.
    let registry_program = sibling("pf-registry", "pfr-registry")?;
    let cast = Cast::new(args.kv)?;
    let stage = Stage::new(args.keep)?;
    let mut narrator = Narrator::new(if context.json { Out::stderr() } else { Out::stdout() });
    let paint = narrator.out().paint;

    narrator.say(&paint.bold("pf: a durable registry for the KV caches of LLM agents"))?;
    narrator.say(&paint.dim(&format!("everything below happens in {}", stage.root().display())))?;

    narrator.step("A registry: one process, one directory")?;
    narrator.command("pf-registry serve --data registry --listen 127.0.0.1:0")?;
    let registry = Registry::start(&registry_program, &stage.at("registry"), stage.at("registry.log")).await?;
    narrator.result(&format!("listening on {}", registry.url()))?;
    narrator.command(&format!("export PF_REGISTRY={}", registry.url()))?;

    let mut play = Play::new(&mut narrator, &stage, &cast, registry.url(), context.quiet)?;
    let played = play.all().await;
    if let Err(failure) = played {
        let step = narrator.current().unwrap_or_default().to_owned();
        return Err(failure.context(&format!("demo, at {step:?}")));
    }
    registry.stop().await?;

    narrator.say("")?;
    narrator.say(&format!("{} in {}; the registry has been stopped.", paint.green("All of it held"), duration(start.elapsed())))?;
    epilogue(&mut narrator, &stage)?;
    if context.json {
        let directory = stage.kept().then(|| stage.root().display().to_string());
        let seconds = start.elapsed().as_secs_f64();
        context.out.json(&Summary { ok: true, directory, seconds, steps: narrator.told() })?;
    }
    Ok(())
}

fn epilogue(narrator: &mut Narrator, stage: &Stage) -> Result<(), Failure> {
    let own = "a snapshot directory of yours";
    let mut next = if stage.kept() {
        vec![
            (format!("pf-registry serve --data {}", stage.at("registry").display()), "the demo's registry again"),
            ("pf stats agent/main".into(), "look around in it"),
        ]
    } else {
        vec![
            ("pf demo --keep DIR".into(), "the same, and keep everything to look at"),
            ("pf-registry serve --data DIR".into(), "a registry of your own"),
        ]
    };
    next.extend([("pf push DIR team/agent:step-1".into(), own), ("pf --help".into(), "everything else")]);
    let widest = next.iter().map(|(command, _)| columns(command)).max().unwrap_or(0);
    let paint = narrator.out().paint;
    narrator.say("\nNext:")?;
    next.iter().try_for_each(|(command, why)| narrator.say(&format!("  {}  {}", pad(command, widest), paint.dim(why))))
}
