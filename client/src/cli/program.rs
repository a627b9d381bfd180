//! From arguments to an exit code: the same for `pf` and for its programs.

use super::args::Global;
use super::context::Context;
use super::failure::Failure;
use super::usage;
use pfr_service::LogFormat;
use pfr_service::signals::Signal;
use pfr_service::traces::{COMMAND_END, TraceSettings, Traces};
use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

/// A command line, and the work that it asks for.
pub trait Program: clap::Parser {
    /// Tells the user of an interrupted run how to go on. `None`: there is nothing to go on with,
    /// unless the work says so in [`Context::when_interrupted`].
    fn resume_hint(&self) -> Option<&'static str>;

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
    if !json && !program.global().quiet {
        for warning in usage::misspelt(&P::command(), std::env::vars_os().map(|(name, _)| name)) {
            // A closed standard error is no reason to refuse a command.
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
    }
    let opened = match pfr_service::traces::open("pf", &TraceSettings::default()) {
        Ok(opened) => opened,
        Err(error) => return Failure::usage(error.to_string()).report(json),
    };
    if let Some(error) = opened.refused {
        // A closed standard error is no reason to refuse a command.
        let _ = writeln!(std::io::stderr(), "no traces are sent: {error}");
    }
    start_log(opened.traces);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::bug(format!("cannot start worker threads: {error}")).report(json),
    };
    let span = span_of::<P>();
    let work = async {
        let mut context = Context::new(program.global().clone())?;
        if let Some(hint) = program.resume_hint() {
            context.when_interrupted(hint);
        }
        let words = context.interrupted();
        tokio::select! {
            result = run(program, &mut context) => result,
            signal = signal() => Err(interrupted(signal, words.lock().as_deref())),
        }
    };
    let result = runtime.block_on(work.instrument(span.clone()));
    // Hashing threads may still be busy with pages that are no longer needed.
    runtime.shutdown_timeout(Duration::from_millis(50));
    let code = match &result {
        Ok(()) => 0,
        Err(failure) => failure.exit(),
    };
    span.record("process.exit.code", i64::from(code));
    if code > 0 {
        span.record("otel.status_code", "ERROR");
    }
    drop(span);
    // The user reads the outcome before the last spans are sent.
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    };
    pfr_service::traces::finish(COMMAND_END);
    code
}

/// The span of this run. It has the names of the commands, and no argument: these may hold secrets.
fn span_of<P: Program>() -> Span {
    let span = tracing::info_span!("command", "otel.name" = Empty, "process.exit.code" = Empty, "otel.status_code" = Empty,);
    if !span.is_disabled() {
        span.record("otel.name", commands_in(&P::command(), std::env::args_os().skip(1)));
    }
    span
}

/// The name of a program and of the commands among its arguments: `pf tag rm`.
fn commands_in(program: &clap::Command, arguments: impl Iterator<Item = OsString>) -> String {
    let (mut name, mut level) = (program.get_name().to_owned(), program);
    for argument in arguments.take_while(|argument| argument != "--") {
        if let Some(command) = level.find_subcommand(&argument) {
            name = format!("{name} {}", command.get_name());
            level = command;
        }
    }
    name
}

async fn run<P: Program>(program: P, context: &mut Context) -> Result<(), Failure> {
    let result = program.run(context).await;
    let flushed = context.out.flush();
    result.map_err(|failure| context.explain(failure))?;
    flushed
}

/// A log on stderr, only if `RUST_LOG` asks for one, and the export of spans, only if a collector
/// is named.
fn start_log(traces: Option<Traces>) {
    let filter = std::env::var("RUST_LOG").ok();
    // A variable meant for another program is no reason to refuse a command.
    let _ = pfr_service::log::subscribe(filter.as_deref().map(|filter| (LogFormat::Text, filter)), traces);
}

/// Completes when Ctrl-C, SIGTERM or a closed terminal ends the command. The work is then dropped,
/// and child processes with it.
async fn signal() -> Signal {
    match pfr_service::signals::of_command() {
        Ok(signal) => signal.await,
        // The signals keep their default: they end the process.
        Err(_) => std::future::pending().await,
    }
}

/// The end of an interrupted command, and how to go on.
fn interrupted(signal: Signal, words: Option<&str>) -> Failure {
    let message = words.map_or_else(|| "interrupted".to_owned(), |words| format!("interrupted; {words}"));
    Failure::interrupted(signal.exit_code(), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_named_by_commands_and_never_by_arguments() {
        let pf = clap::Command::new("pf")
            .subcommand(clap::Command::new("push"))
            .subcommand(clap::Command::new("tag").subcommand(clap::Command::new("rm").alias("remove")));
        for (line, name) in
            [("--token hush push a/b:c", "pf push"), ("tag remove push", "pf tag rm"), ("hush", "pf"), ("-- push", "pf"), ("", "pf")]
        {
            let arguments = line.split_whitespace();
            assert_eq!(commands_in(&pf, arguments.map(OsString::from)), name);
        }
    }
}
