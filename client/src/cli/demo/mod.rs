//! `pf demo`: the whole story on real input. An engine is captured in mid-sentence, forks, and goes on elsewhere bit for bit.
//!
//! Registry, agents and engines are real child processes; what `pf` would do is done by this crate, as a user's `pf` would.
//! [`acts`] is the play, [`script`] what the model is asked, [`host`] what runs where, [`narrator`] what is said about it.

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

use super::args::Demo;
use super::context::Context;
use super::failure::Failure;
use super::output::Out;
use super::output::human::{columns, duration, pad};
use acts::Play;
use host::Programs;
use narrator::{Narrator, Told};
use processes::service;
use script::Script;
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
