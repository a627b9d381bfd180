//! `pf-bench`: measures `pf` beside other programs (the contenders), the limit and the floor of the
//! machine. They take turns in one run.
//!
//! ```text
//! run       push and pull of a workload by all contenders, graded         runner ─▶ contender/* ─▶ report/*, goals
//! limit     the smallest programs that push and pull, beside the floor    runner ─▶ limit/*
//! store     the store alone, in this process: look-ups, inserts, ingest   micro
//! requests  requests whose time must not grow with the store              micro/requests
//! pages     what grows with the number of pages: time, memory             pages
//! ui        the pages of a registry's UI, with a thousand forks           micro/ui
//! company   a registry with many clients at once: memory, shares          company/*
//! codecs    encode, decode and ratio of the tensor codecs                 codecs
//! capture   how long an engine is paused, and how many bytes move         capture, agents
//! restore   restores from a registry, with and without a pull before      restore, agents
//! gc        cost of collection by size of the store, and beside pushes    gc/*
//! replicas  one registry against three on one database and storage        replicas
//! scale     fleets, from costs measured in the same run                   scale/*
//! floor     the fastest way of copying, hashing and syncing here          floor, tune
//! ```

#![expect(clippy::print_stdout, reason = "a program whose result is a table on stdout")]

mod agents;
mod capture;
mod codecs;
mod company;
mod contender;
mod floor;
mod gc;
mod generated;
mod goals;
mod limit;
mod machine;
mod meter;
mod micro;
mod pack;
mod pages;
mod replicas;
mod report;
mod restore;
mod runner;
mod scale;
mod tune;
mod usage;
mod workload;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Any error ends a benchmark, so only its message matters.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Measures pf beside other programs, and beside the floor of the machine.
#[derive(Parser)]
#[command(name = "pf-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Push and pull of a workload, every contender in turn, graded by the goals
    Run(runner::Args),
    /// The smallest pair of programs that moves the same bytes over a socket, beside the floor
    Limit(runner::Common),
    /// One side of the limit, as its contender starts it
    #[command(hide = true)]
    LimitSide(limit::Args),
    /// The store alone, in this process
    Store(micro::Args),
    /// Statistics, matches and ancestors in large stores
    Requests(micro::requests::Args),
    /// Pushes, pulls and verifies snapshots of 40,000 and 200,000 small pages: time and memory
    Pages(pages::Args),
    /// Pages of a registry's UI, with a thousand forks of an agent
    Ui(micro::ui::Args),
    /// A registry with many clients at once: its memory, and how they share its throughput
    Company(company::Args),
    /// Tensor codecs on real pages, beside zstd and a plain copy
    Codecs(codecs::Args),
    /// Capture and restore of an engine, by length of the session
    Capture(capture::Args),
    /// Restores of pages that a host lacks, from a registry on this machine
    Restore(restore::Args),
    /// Collection: the same garbage in stores of different sizes, and pushes beside it
    Gc(gc::Args),
    /// One registry process against three on the same database and storage
    Replicas(replicas::Args),
    /// Fleets from one host to ten thousand: rates, rows, bytes, cost, and which resource runs out
    /// first
    Scale(scale::Args),
    /// Tries ways of copying, hashing and syncing, to find the floor of this machine
    Floor(tune::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => runner::run(&args),
        Command::Limit(args) => runner::limit(&args),
        Command::LimitSide(args) => limit::run(&args),
        Command::Store(args) => micro::run(&args),
        Command::Requests(args) => micro::requests::run(&args),
        Command::Pages(args) => pages::run(&args),
        Command::Ui(args) => micro::ui::run(&args),
        Command::Company(args) => company::run(&args),
        Command::Codecs(args) => codecs::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Restore(args) => restore::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Replicas(args) => replicas::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Floor(args) => tune::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pf-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
