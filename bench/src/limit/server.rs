//! The server of the limit: packs in a directory, and their list in memory.

use super::Packing;
use super::wire::{GET, PUSH, READ_AHEAD, number, prepare, receive_list, send};
use crate::Result;
use crate::pack::{Groups, Lanes, Piece};
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Mutex;

struct Server<'a> {
    dir: &'a Path,
    packing: Packing,
    /// All packs, in the order in which they became durable.
    packs: Mutex<Vec<Vec<Piece>>>,
}

/// Prints the address and serves until the process is killed.
pub fn run(dir: &Path, packing: Packing) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{}", listener.local_addr()?);
    let server = Server { dir, packing, packs: Mutex::new(Vec::new()) };
    std::thread::scope(|scope| {
        for (connection, stream) in listener.incoming().enumerate() {
            let (stream, server) = (stream?, &server);
            scope.spawn(move || {
                // The client sees that the connection is closed.
                if let Err(error) = server.serve(connection, &stream) {
                    eprintln!("pf-bench limit-side serve: {error}");
                }
            });
        }
        Ok(())
    })
}

impl Server<'_> {
    fn serve(&self, connection: usize, stream: &TcpStream) -> Result<()> {
        prepare(stream)?;
        let mut from = BufReader::with_capacity(READ_AHEAD, stream);
        let mut to = stream;
        let mut sending = Groups::new(Lanes::Four.buffer(), None);
        loop {
            let mut request = [0];
            match from.read_exact(&mut request) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                read => read?,
            }
            match request[0] {
                PUSH => {
                    let stored = self.store(connection, &mut from)?;
                    to.write_all(&stored.to_le_bytes())?;
                }
                GET => {
                    let number = usize::try_from(number(&mut from)?)?;
                    let pack = self.packs.lock().map_err(|_| "a thread panicked")?.get(number).cloned().unwrap_or_default();
                    send(&mut to, &pack, &mut sending)?;
                }
                other => return Err(format!("an unknown request: {other}").into()),
            }
        }
    }

    /// Stores batches until an empty one. Returns how many blobs are on disk.
    fn store(&self, connection: usize, from: &mut impl std::io::Read) -> Result<u32> {
        let Packing { direct, lanes } = self.packing;
        let mut groups = Groups::new(lanes.buffer(), Some(lanes));
        let (mut stored, mut packs) = (0, Vec::new());
        loop {
            let list = receive_list(from)?;
            if list.is_empty() {
                break;
            }
            let path = self.dir.join(format!("{connection:03}-{:06}", packs.len()));
            packs.push(groups.pack(&path, &list, direct, &mut |_, place| Ok(from.read_exact(place)?))?);
            stored += u32::try_from(list.len())?;
        }
        File::open(self.dir)?.sync_all()?;
        self.packs.lock().map_err(|_| "a thread panicked")?.extend(packs);
        Ok(stored)
    }
}
