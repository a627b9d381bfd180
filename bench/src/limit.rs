//! The limit: the smallest pair of programs that moves the same bytes over a socket as a push or a
//! pull.
//!
//! One program reads and sends. The other receives, hashes four blobs side by side, or as many as
//! `pf` ([`Lanes`]), compares the digests, and writes 64 MiB files (past the page cache on disk),
//! each with one fsync. There are no metadata, no checksums and no HTTP. So the difference between
//! `pf` and the limit is the price of everything else that `pf` does.
//!
//! ```text
//! push   client: files ─▶ socket ─▶ server: hash ─▶ packs, fsync ─▶ count
//! pull   server: packs ─▶ socket ─▶ client: hash ─▶ packs, files or nothing
//! ```
//!
//! Both programs are `pf-bench` itself: `pf-bench limit` and `pf-bench run` start them as
//! `pf-bench limit-side`.
//! There is one thread for each connection on each side.

mod client;
mod server;
mod wire;

use crate::Result;
use crate::pack::Lanes;
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
        /// How many blobs are hashed side by side
        #[arg(long)]
        lanes: Lanes,
    },
    /// Send the blobs of a snapshot directory
    Push {
        /// The server
        #[arg(long)]
        to: SocketAddr,
        /// The snapshot directory
        #[arg(long)]
        snapshot: PathBuf,
        /// Number of connections
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
        /// Form in which to write the bytes
        #[arg(long)]
        form: Form,
        /// Write past the page cache
        #[arg(long)]
        direct: bool,
        /// How many blobs are hashed side by side
        #[arg(long)]
        lanes: Lanes,
        /// Number of connections
        #[arg(long)]
        connections: usize,
    },
}

/// The form in which a pull writes the bytes.
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
    /// The value of the option `--form`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Packs => "packs",
            Self::Files => "files",
            Self::Memory => "memory",
        }
    }
}

/// How bytes are received.
#[derive(Clone, Copy)]
struct Packing {
    /// They are written past the page cache.
    direct: bool,
    /// How many blobs are hashed side by side.
    lanes: Lanes,
}

/// Runs one side. The server runs until it is killed.
pub fn run(args: &Args) -> Result<()> {
    match &args.side {
        Side::Serve { dir, direct, lanes } => server::run(dir, Packing { direct: *direct, lanes: *lanes }),
        Side::Push { to, snapshot, connections } => client::push(*to, snapshot, *connections),
        Side::Pull { from, into, form, direct, lanes, connections } => {
            let packing = Packing { direct: *direct, lanes: *lanes };
            client::pull(*from, into, *form, packing, *connections)
        }
    }
}
