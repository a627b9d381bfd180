//! Leaving a pack that is no longer sound: its good frames are copied, as they lie, into a new one.

use super::{Piece, READ, read_piece};
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Moved, PackRow, Packed};
use crate::pack_writer::{PackWriter, path};
use pfr_schema::frame::{CHECKSUM, Header};

/// Copies what lies in `pack` and is not damaged. The frames were checked just now; what lies in another pack by then is dead space in the new one.
pub(super) async fn evacuate(store: &Store, pack: &PackRow) -> Result<()> {
    let contents = store.metadata.pack_contents(pack.id).await?;
    if contents.is_empty() {
        return Ok(());
    }
    let mut writer = PackWriter::begin(store).await?;
    let mut moved = Vec::with_capacity(contents.len());
    for frame in contents {
        moved.push(Moved { object: frame.object, from: pack.id, offset: writer.len() });
        if let Err(error) = copy(store, pack, &frame, &mut writer).await {
            writer.abandon().await;
            return Err(error);
        }
    }
    writer.finish_moved(store, moved).await
}

async fn copy(store: &Store, pack: &PackRow, frame: &Packed, writer: &mut PackWriter) -> Result<()> {
    let path = path(&pack.key);
    let damaged = |reason: String| Error::Corrupt { digest: frame.digest, reason };
    let header_len = Header::len(frame.digest.algorithm()) as u64;
    let (mut at, end) = (frame.offset, frame.offset + frame.frame_len);
    while at < end {
        let want = end.min(at + READ);
        let piece = match read_piece(store, &path, at..want).await? {
            Piece::Bytes(bytes) if bytes.len() as u64 == want - at => bytes,
            _ => return Err(damaged(format!("pack {} is cut", pack.key))),
        };
        if at == frame.offset {
            let (header, rest) = (piece.slice(..header_len as usize), piece.slice(header_len as usize..));
            let header = Header::parse_exact(&header, at, &store.options.limits).map_err(|e| damaged(e.to_string()))?;
            if header.digest != frame.digest || header.frame_len() != frame.frame_len || header.stored_len + CHECKSUM as u64 + header_len != frame.frame_len {
                return Err(damaged(format!("pack {}, byte {at}: no frame of it there", pack.key)));
            }
            writer.header(header, None).await?;
            writer.append(rest).await?;
        } else {
            writer.append(piece).await?;
        }
        at = want;
    }
    Ok(())
}
