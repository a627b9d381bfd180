//! Redis, or Valkey: a cache in memory, without persistence. The client sends several commands
//! before it reads the answers, reads files right into what it sends, and values right into a
//! buffer that it uses again.
//!
//! Only in memory: a disk would hold the input and nothing else.

mod resp;

use super::{Contender, Found, Programs, free_port, install, reads};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::pack::{Lanes, Piece, Promise, Source, verify};
use crate::usage::{self, Server};
use crate::workload::{Blob, Workload};
use std::io::{BufReader, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Connections, each with a thread of its own here.
const CONNECTIONS: usize = 4;
/// Commands that are sent before an answer is read, if no more blobs are hashed side by side.
const DEPTH: usize = 8;
/// Longest wait for the server.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are read ahead of a value: these alone are copied once more.
const READ_AHEAD: usize = 4 << 10;

struct Redis {
    program: PathBuf,
}

/// Finds the program.
pub fn find(_: &Programs) -> Found {
    let program = usage::find(&["redis-server", "valkey-server"])
        .ok_or_else(|| install("redis", "apt-get install redis-server (or, from Debian 13 on, valkey-server)"))?;
    Ok(Box::new(Redis { program }))
}

impl Contender for Redis {
    fn runs_in(&self, place: &str) -> bool {
        place == "tmpfs"
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let port = free_port()?;
        let mut command = Command::new(&self.program);
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--daemonize", "no", "--save", "", "--appendonly", "no"]);
        let server = Server::start(command.arg("--dir").arg(dir).current_dir(dir), port, &dir.join("redis.log"))?;
        let (servers, raw, blobs) = ([server.pid()], workload.base.bytes(), &workload.base.blobs);
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, &servers, || {
            each(port, blobs, DEPTH, |connection, group| connection.put(group))?;
            Ok(Reported::default())
        })?;
        for (step, hash) in reads() {
            let depth = hash.map_or(DEPTH, |lanes| DEPTH.max(lanes.most()));
            meter.measure(step, raw, dir, &servers, || {
                each(port, blobs, depth, |connection, group| connection.get(group, hash))?;
                Ok(Reported::default())
            })?;
        }
        Ok(())
    }
}

/// A connection, and the buffer that it uses again.
struct Connection {
    stream: TcpStream,
    answers: BufReader<TcpStream>,
    buffer: Vec<u8>,
}

impl Connection {
    fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let answers = BufReader::with_capacity(READ_AHEAD, stream.try_clone()?);
        Ok(Self { stream, answers, buffer: Vec::new() })
    }

    /// A buffer of so many bytes. It is not cleared each time.
    fn grow(&mut self, bytes: usize) {
        if self.buffer.len() < bytes {
            self.buffer.resize(bytes, 0);
        }
    }

    fn put(&mut self, blobs: &[Blob]) -> Result<()> {
        let heads: Vec<Vec<u8>> = blobs.iter().map(|blob| resp::set_head(&blob.name(), blob.len)).collect();
        let bytes: usize = heads.iter().zip(blobs).map(|(head, blob)| head.len() + blob.len + resp::END.len()).sum();
        self.grow(bytes);
        let mut at = 0;
        for (head, blob) in heads.iter().zip(blobs) {
            let (value, end) = (at + head.len(), at + head.len() + blob.len);
            self.buffer[at..value].copy_from_slice(head);
            Source::default().read(&[Piece::of(blob)], &mut self.buffer[value..end])?;
            at = end + resp::END.len();
            self.buffer[end..at].copy_from_slice(resp::END);
        }
        self.stream.write_all(&self.buffer[..bytes])?;
        blobs.iter().try_for_each(|_| resp::read_ok(&mut self.answers))
    }

    fn get(&mut self, blobs: &[Blob], hash: Option<Lanes>) -> Result<()> {
        self.stream.write_all(&blobs.iter().flat_map(|blob| resp::get(&blob.name())).collect::<Vec<u8>>())?;
        let bytes: usize = blobs.iter().map(|blob| blob.len).sum();
        self.grow(bytes);
        let mut rest = &mut self.buffer[..bytes];
        for blob in blobs {
            let (own, next) = rest.split_at_mut(blob.len);
            resp::read_value(&mut self.answers, own).map_err(|e| format!("{}: {e}", blob.name()))?;
            rest = next;
        }
        let promised: Vec<Promise> = blobs.iter().map(Promise::of).collect();
        hash.map_or(Ok(()), |lanes| verify(&promised, &self.buffer[..bytes], lanes))
    }
}

/// Hands groups of `depth` blobs to as many threads as there are connections.
fn each(port: u16, blobs: &[Blob], depth: usize, work: impl Fn(&mut Connection, &[Blob]) -> Result<()> + Sync) -> Result<()> {
    let groups: Vec<&[Blob]> = blobs.chunks(depth).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let thread = || -> Result<()> {
            let mut connection = Connection::open(port)?;
            while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(&mut connection, group)?;
            }
            Ok(())
        };
        let threads: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(thread)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })
}
