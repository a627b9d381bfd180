//! The limit: the smallest pair of programs that moves the same bytes over a socket. One reads and
//! sends, the other receives, hashes four blobs side by side, compares, and writes 64 MiB files
//! (past the page cache on disk), each with one fsync. No metadata, no checksums, no HTTP: the
//! difference to it is the price of everything else that `pf` does.
//!
//! ```text
//! push   client: files ─▶ socket ─▶ server: hash × 4 ─▶ packs, fsync ─▶ count
//! pull   server: packs ─▶ socket ─▶ client: hash × 4 ─▶ packs, files or nothing
//! ```
//!
//! Both are this program: `pf-bench limit` and `pf-bench run` start it as `pf-bench limit-side`.
//! There is one thread for each connection on each side.

mod client;
mod server;
mod wire;

use crate::Result;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Arguments of `limit-side`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    side: Side,
}

#[derive(clap::Subcommand)]
enum Side {
    /// Keep what is pushed, and send it back
    Serve {
        /// Directory for packs
        #[arg(long)]
        dir: PathBuf,
        /// Write past the page cache
        #[arg(long)]
        direct: bool,
    },
    /// Send the blobs of a snapshot directory
    Push {
        /// The server
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        snapshot: PathBuf,
        #[arg(long)]
        connections: usize,
    },
    /// Receive everything that the server has
    Pull {
        /// The server
        #[arg(long)]
        from: SocketAddr,
        /// A directory that does not exist
        #[arg(long)]
        into: PathBuf,
        /// What to make of it
        #[arg(long)]
        form: Form,
        /// Write past the page cache
        #[arg(long)]
        direct: bool,
        #[arg(long)]
        connections: usize,
    },
}

/// What a pull makes of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// 64 MiB files
    Packs,
    /// A file for each blob
    Files,
    /// Nothing: the bytes are verified in memory
    Memory,
}

impl Form {
    /// As an argument.
    pub fn name(self) -> &'static str {
        match self {
            Self::Packs => "packs",
            Self::Files => "files",
            Self::Memory => "memory",
        }
    }
}

/// Runs one side. The server runs until it is killed.
pub fn run(args: &Args) -> Result<()> {
    match &args.side {
        Side::Serve { dir, direct } => server::run(dir, *direct),
        Side::Push { to, snapshot, connections } => client::push(*to, snapshot, *connections),
        Side::Pull { from, into, form, direct, connections } => client::pull(*from, into, *form, *direct, *connections),
    }
}
