//! What goes over a connection. A request is one byte, which a pull follows with a number:
//!
//! ```text
//! push   'P' batch … batch of 0          ◀─ u32 number of blobs that are on disk
//! pull   'G' u32 pack                    ◀─ batch; of 0 blobs beyond the last pack
//! batch  u32 number of blobs, for each its digest and u32 length, then their bytes
//! ```
//!
//! Numbers are little-endian. Both ends are the same build of this program, so there is no version.

use crate::Result;
use crate::pack::{Groups, Piece, Promise, Source};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The first byte of a push.
pub const PUSH: u8 = b'P';
/// The first byte of a request for a pack.
pub const GET: u8 = b'G';
/// Most blobs in a batch.
const BLOBS: u32 = 1 << 20;
/// Bytes that are read ahead of a list. Few: these alone are copied once more.
pub const READ_AHEAD: usize = 4 << 10;
/// Longest wait for the other side.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sets timeouts, and sends small messages at once.
pub fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream.set_write_timeout(Some(TIMEOUT))?)
}

/// Sends blobs, as many as the buffer holds at a time. They are not hashed: the receiver does.
pub fn send(to: &mut impl Write, pieces: &[Piece], groups: &mut Groups) -> Result<()> {
    let promised: Vec<Promise> = pieces.iter().map(|piece| piece.promise).collect();
    let mut head = Vec::with_capacity(4 + 36 * promised.len());
    head.extend(u32::try_from(promised.len())?.to_le_bytes());
    for blob in &promised {
        head.extend(blob.digest);
        head.extend(u32::try_from(blob.len)?.to_le_bytes());
    }
    to.write_all(&head)?;
    let mut source = Source::default();
    groups.each(&promised, &mut |range, place| source.read(&pieces[range], place), &mut |filled| Ok(to.write_all(filled.bytes)?))
}

/// Receives the list of a batch. Its bytes follow.
pub fn receive_list(from: &mut impl Read) -> Result<Vec<Promise>> {
    let count = number(from)?;
    if count > BLOBS {
        return Err(format!("a batch of {count} blobs: more than {BLOBS}").into());
    }
    let mut list = Vec::new();
    // The list grows as it arrives: a false number takes no memory.
    for _ in 0..count {
        let mut digest = [0; 32];
        from.read_exact(&mut digest)?;
        list.push(Promise { digest, len: usize::try_from(number(from)?)? });
    }
    Ok(list)
}

/// Receives a number.
pub fn number(from: &mut impl Read) -> Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(list) = receive_list(&mut bytes.as_slice()) {
                prop_assert!(4 + 36 * list.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn a_list_beyond_the_limit_is_an_error() {
        let bytes = (BLOBS + 1).to_le_bytes();
        assert!(receive_list(&mut bytes.as_slice()).unwrap_err().to_string().contains("more than"));
    }
}
