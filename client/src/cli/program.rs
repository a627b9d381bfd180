//! From arguments to an exit code: the same for `pf` and for its programs.

use super::args::Global;
use super::context::Context;
use super::failure::Failure;
use super::usage;
use pfr_service::LogFormat;
use std::process::ExitCode;
use std::time::Duration;

/// A command line, and the work that it asks for.
pub trait Program: clap::Parser {
    /// Tells the user of an interrupted run how to go on.
    const RESUME_HINT: &str;

    /// The options that all programs share.
    fn global(&self) -> &Global;

    /// Does the work.
    fn run(self, context: &mut Context) -> impl Future<Output = Result<(), Failure>>;
}

/// Parses the arguments, does the work, and reports how it went.
pub fn main<P: Program>() -> ExitCode {
    // Known before the arguments are parsed: an error in them is JSON, too.
    let json = usage::asks_for_json(std::env::args_os());
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("a panic without a message");
        let bug = Failure::bug(format!("bug in pf: {what}{place}"))
            .hint("please report this with the command you ran; nothing acknowledged is lost");
        bug.report(json);
        std::process::exit(i32::from(bug.exit()));
    }));
    let program = match usage::parse::<P>(json) {
        Ok(program) => program,
        Err(code) => return code,
    };
    start_log();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::bug(format!("cannot start worker threads: {error}")).report(json),
    };
    let result = runtime.block_on(async {
        tokio::select! {
            result = run(program) => result,
            interrupted = interrupted(P::RESUME_HINT) => Err(interrupted),
        }
    });
    // Hashing threads may still be busy with pages that are no longer needed.
    runtime.shutdown_timeout(Duration::from_millis(50));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

async fn run<P: Program>(program: P) -> Result<(), Failure> {
    let mut context = Context::new(program.global().clone())?;
    let result = program.run(&mut context).await;
    let flushed = context.out.flush();
    result.map_err(|failure| context.explain(failure))?;
    flushed
}

/// A log on stderr, only if `RUST_LOG` asks for one.
fn start_log() {
    if let Ok(filter) = std::env::var("RUST_LOG") {
        // A variable meant for another program is no reason to refuse a command.
        let _ = pfr_service::log::subscribe(LogFormat::Text, &filter);
    }
}

/// Completes when Ctrl-C, SIGTERM or a closed terminal ends the command. The work is then dropped,
/// and child processes with it.
async fn interrupted(resume_hint: &str) -> Failure {
    match pfr_service::signals::of_command() {
        Ok(signal) => Failure::interrupted(signal.await.exit_code(), format!("interrupted; {resume_hint}")),
        // The signals keep their default: they end the process.
        Err(_) => std::future::pending().await,
    }
}
