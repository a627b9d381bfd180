//! `pf`: from arguments to an exit code.
//!
//! [`args`] says what can be typed, [`context`] what was configured, [`side`] hides whether a command looks at a registry or
//! at the local store, `commands` has one module per command, [`output`] is the only place that writes to stdout.
//! Every failure ends as a [`failure::Failure`], which knows its exit code and what the user can do.

mod args;
mod commands;
mod config;
mod context;
mod demo;
mod failure;
mod output;
mod progress;
mod side;
mod signals;
mod suggest;
mod usage;

use args::{Args, Command};
use context::Context;
use failure::Failure;
use pfr_schema::ErrorCode;
use std::process::ExitCode;
use std::time::Duration;

/// Exit code of a bug.
const BUG: u8 = 70;

/// Parses the arguments, runs the command, tells how it went.
pub fn main() -> ExitCode {
    // Known before the arguments are parsed: an error in them is JSON, too.
    let json = usage::asks_for_json(std::env::args_os());
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("a panic without a message");
        let bug = Failure::bare(ErrorCode::Internal, format!("bug in pf: {what}{place}"));
        bug.hint("please report this with the command you ran; nothing acknowledged is lost").report(json);
        std::process::exit(i32::from(BUG));
    }));
    let args = match usage::parse(json) {
        Ok(args) => args,
        Err(code) => return code,
    };
    start_log();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::bare(ErrorCode::Internal, format!("cannot start worker threads: {error}")).report(json),
    };
    let farewell = match &args.command {
        Command::Demo(_) => "everything the demo started has been stopped",
        _ => "run the same command again to resume",
    };
    let result = runtime.block_on(async {
        tokio::select! {
            result = run(args) => result,
            interrupted = signals::interrupted(farewell) => Err(interrupted),
        }
    });
    // Hashing threads may still be busy with pages that are no longer needed.
    runtime.shutdown_timeout(Duration::from_millis(50));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

async fn run(args: Args) -> Result<(), Failure> {
    let mut context = Context::new(args.global)?;
    let result = commands::run(&mut context, args.command).await;
    let flushed = context.out.flush();
    result.map_err(|failure| failure.at(&context.site()))?;
    flushed
}

/// A log on stderr, only if `RUST_LOG` asks for one.
fn start_log() {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::util::SubscriberInitExt as _;
    if let Some(filter) = std::env::var("RUST_LOG").ok().and_then(|filter| filter.parse::<Targets>().ok()) {
        tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_writer(std::io::stderr).finish().with(filter).init();
    }
}
