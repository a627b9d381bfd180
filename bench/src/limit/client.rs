//! The client of the limit.

use super::wire::{GET, PUSH, READ_AHEAD, number, prepare, receive_list, send};
use super::{Form, Packing};
use crate::Result;
use crate::pack::{Groups, Lanes, Piece, Promise, split};
use crate::workload::Snapshot;
use std::fs::File;
use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Sends the blobs of a snapshot directory. They are on disk at the server when this returns.
pub fn push(to: SocketAddr, snapshot: &Path, connections: usize) -> Result<()> {
    let snapshot = Snapshot::read(snapshot.to_owned())?;
    let pieces: Vec<Piece> = snapshot.blobs.iter().map(Piece::of).collect();
    let runs = split(&pieces);
    let next = AtomicUsize::new(0);
    each(connections, || {
        let mut stream = connect(to)?;
        let mut groups = Groups::new(Lanes::Four.buffer(), None);
        stream.write_all(&[PUSH])?;
        let mut sent = 0;
        while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            send(&mut stream, run, &mut groups)?;
            sent += run.len();
        }
        send(&mut stream, &[], &mut groups)?;
        let stored = number(&mut stream)?;
        if stored as usize == sent { Ok(()) } else { Err(format!("{sent} blobs were sent, {stored} are stored").into()) }
    })
}

/// Receives and verifies everything that the server has. It is on disk when this returns, unless
/// the form is [`Form::Memory`].
pub fn pull(from: SocketAddr, into: &Path, form: Form, packing: Packing, connections: usize) -> Result<()> {
    if form != Form::Memory {
        std::fs::create_dir(into)?;
    }
    if form == Form::Files {
        (0..=u8::MAX).try_for_each(|first| std::fs::create_dir(into.join(format!("{first:02x}"))))?;
    }
    let (next, Packing { direct, lanes }) = (AtomicU32::new(0), packing);
    each(connections, || {
        let stream = connect(from)?;
        let (mut to, mut from) = (&stream, BufReader::with_capacity(READ_AHEAD, &stream));
        let mut groups = Groups::new(lanes.buffer(), Some(lanes));
        loop {
            let pack = next.fetch_add(1, Ordering::Relaxed);
            let [a, b, c, d] = pack.to_le_bytes();
            to.write_all(&[GET, a, b, c, d])?;
            let list = receive_list(&mut from)?;
            if list.is_empty() {
                return Ok(());
            }
            let mut fill = |_: Range<usize>, place: &mut [u8]| -> Result<()> { Ok(from.read_exact(place)?) };
            match form {
                Form::Packs => drop(groups.pack(&into.join(format!("{pack:06}")), &list, direct, &mut fill)?),
                Form::Files => groups.each(&list, &mut fill, &mut |filled| files(into, &list[filled.blobs.clone()], filled.bytes))?,
                Form::Memory => groups.each(&list, &mut fill, &mut |_| Ok(()))?,
            }
        }
    })?;
    match form {
        Form::Packs => Ok(File::open(into)?.sync_all()?),
        // One sync for thousands of files.
        Form::Files => Ok(rustix::fs::syncfs(File::open(into)?)?),
        Form::Memory => Ok(()),
    }
}

/// Writes a file for each blob.
fn files(into: &Path, blobs: &[Promise], mut bytes: &[u8]) -> Result<()> {
    for blob in blobs {
        let (own, rest) = bytes.split_at(blob.len);
        let name = hex::encode(blob.digest);
        File::create_new(into.join(&name[..2]).join(&name))?.write_all(own)?;
        bytes = rest;
    }
    Ok(())
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to)?;
    prepare(&stream)?;
    Ok(stream)
}

/// Runs `work` on as many threads as there are connections.
fn each(connections: usize, work: impl Fn() -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..connections.max(1)).map(|_| scope.spawn(&work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a thread panicked")?)
    })
}
