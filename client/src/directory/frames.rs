//! Files as frames: read and encoded on blocking threads, a few pieces ahead of the reader, in
//! memory for a few blobs of at most [`MOST`] bytes.

use super::zstd_frame::{self, Shape};
use super::{Directory, layout};
use crate::encoding::{Encoder, Encoding, MOST};
use crate::error::{Error, Result};
use crate::plan::Item;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use pfr_schema::checkpoint::Dtype;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{CHECKSUM, Header};
use pfr_schema::{ErrorCode, Kind};
use pfr_service::buffers::{Buffer, Pool};
use pfr_store::document_frame;
use rustix::buffer::spare_capacity;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Bytes of a piece: many small frames go in one, a large one in many.
const PIECE: usize = 1 << 20;
/// Room behind a piece for a checksum and the next header, so that the piece need not move.
const ROOM: usize = 512;
/// Pieces read ahead.
const AHEAD: usize = 3;
/// Memory for pieces: of four requests, those read ahead, one being sent and one being read.
static PIECES: Pool = Pool::new(PIECE, 24);

/// The frames of `items`, in order, without an end mark.
pub(crate) fn frames(directory: Arc<Directory>, items: Arc<[Item]>, encoding: Encoding) -> BoxStream<'static, Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    let work = move || {
        let mut output = Output { sender, piece: PIECES.hold(Vec::new()), encoder: encoding.encoder() };
        let mut written = Ok(());
        for item in items.iter() {
            written = directory.write_frame(item, &mut output);
            if written.is_err() {
                break;
            }
        }
        match written.and_then(|()| output.flush(0)) {
            // The receiver is gone: the request was cut, and reports that itself.
            Ok(()) | Err(Stop::Unread) => {}
            Err(Stop::Failed(error)) => drop(output.sender.blocking_send(Err(*error))),
        }
    };
    // Started when the first piece is wanted, so that a stream that is never read reads nothing.
    let start = stream::once(async move {
        pfr_service::task::spawn_blocking(work);
        stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|piece| (piece, receiver)) })
    });
    start.flatten().boxed()
}

enum Stop {
    Unread,
    Failed(Box<Error>),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

struct Output {
    sender: mpsc::Sender<Result<Bytes>>,
    piece: Buffer,
    encoder: Encoder,
}

impl Output {
    /// Makes sure that at least [`ROOM`] bytes fit.
    fn make_room(&mut self) -> std::result::Result<(), Stop> {
        self.reserve(0)
    }

    /// Sends what is collected. Then begins a piece of at least this capacity.
    fn flush(&mut self, capacity: usize) -> std::result::Result<(), Stop> {
        let next = match capacity {
            0 => PIECES.hold(Vec::new()),
            PIECE => PIECES.take(),
            more => PIECES.hold(Vec::with_capacity(more)),
        };
        let whole = std::mem::replace(&mut self.piece, next);
        // A frame of a few bytes may lie where its raw blob was. Until it is sent it holds the
        // memory of its own bytes only.
        let mut whole = if whole.len() < whole.capacity() / 2 { Bytes::copy_from_slice(&whole) } else { whole.freeze() };
        while !whole.is_empty() {
            // A connection that is alive takes such a piece in time; of a larger one, that is not
            // known.
            let piece = whole.split_to(whole.len().min(PIECE));
            self.encoder.wait(|| self.sender.blocking_send(Ok(piece))).map_err(|_| Stop::Unread)?;
        }
        Ok(())
    }

    /// Makes sure that `len` bytes fit, and [`ROOM`].
    fn reserve(&mut self, len: usize) -> std::result::Result<(), Stop> {
        let len = len + ROOM;
        if self.piece.capacity() - self.piece.len() < len { self.flush(len.max(PIECE)) } else { Ok(()) }
    }

    fn append(&mut self, bytes: &[u8]) -> std::result::Result<(), Stop> {
        self.reserve(bytes.len())?;
        self.piece.extend_from_slice(bytes);
        Ok(())
    }

    /// Appends a frame whose payload is all of `input`, as it is.
    fn frame<I: Input>(&mut self, header: &Header, path: &Path, mut input: I) -> std::result::Result<(), Stop> {
        self.append(&header.to_bytes())?;
        let (mut left, mut checksum) = (header.stored_len, 0);
        while left > 0 {
            self.make_room()?;
            let before = self.piece.len();
            left = self.read(header, left, path, &mut input)?;
            checksum = crc32c::crc32c_append(checksum, &self.piece[before..]);
        }
        self.append(&checksum.to_le_bytes())
    }

    /// Appends a frame of the blob with this raw header, which is all of `input`: encoded, if that
    /// makes it smaller.
    fn blob<I: Input>(&mut self, raw: &Header, elements: Option<Dtype>, path: &Path, mut input: I) -> std::result::Result<(), Stop> {
        // A larger blob is not held in memory, so its encoded length cannot be in its header.
        if raw.raw_len > MOST {
            return self.frame(raw, path, input);
        }
        let head = Header::len(raw.digest.algorithm());
        self.reserve(head + raw.raw_len as usize + CHECKSUM)?;
        let begin = self.piece.len();
        let payload = begin + head;
        self.piece.resize(payload, 0);
        let mut left = raw.raw_len;
        while left > 0 {
            left = self.read(raw, left, path, &mut input)?;
        }
        let mut header = *raw;
        if let Some((codec, encoded)) = self.encoder.encode(&self.piece[payload..], elements) {
            (header.codec, header.stored_len) = (codec, encoded.len() as u64);
            self.piece[payload..payload + encoded.len()].copy_from_slice(&encoded);
            self.piece.truncate(payload + encoded.len());
        }
        self.piece[begin..payload].copy_from_slice(&header.to_bytes());
        let checksum = crc32c::crc32c(&self.piece[payload..]);
        self.piece.extend_from_slice(&checksum.to_le_bytes());
        Ok(())
    }

    /// Appends some of the `left` bytes that are left of a payload. Returns how many are left then.
    fn read<I: Input>(&mut self, header: &Header, left: u64, path: &Path, input: &mut I) -> std::result::Result<u64, Stop> {
        let read = input.read_into(&mut self.piece).map_err(|e| unreadable(e, path, header))? as u64;
        let found = match left.checked_sub(read) {
            Some(_) if read == 0 => (header.stored_len - left).to_string(),
            Some(left) => return Ok(left),
            None => "more".to_owned(),
        };
        Err(I::other_length(path, header, &found).into())
    }
}

/// The system cannot read a file, or its bytes do not decode: only the latter is damage.
fn unreadable(error: std::io::Error, path: &Path, header: &Header) -> Error {
    if error.raw_os_error().is_some() {
        return Error::io("read", path)(error);
    }
    Error::WrongBytes {
        path: path.to_owned(),
        digest: header.digest,
        code: ErrorCode::CorruptFrame,
        reason: format!("it does not decode: {error}"),
    }
}

/// Something to read that appends to a vector's spare room.
trait Input {
    fn read_into(&mut self, piece: &mut Vec<u8>) -> std::io::Result<usize>;

    /// The error for another number of bytes than the header gives.
    fn other_length(path: &Path, header: &Header, found: &str) -> Error;
}

impl Input for File {
    fn read_into(&mut self, piece: &mut Vec<u8>) -> std::io::Result<usize> {
        loop {
            // Reads into memory that is not zeroed first.
            match rustix::io::read(&*self, spare_capacity(piece)) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    fn other_length(path: &Path, header: &Header, found: &str) -> Error {
        Error::Changed { path: path.to_owned(), reason: format!("it had {} bytes, now it has {found}", header.stored_len) }
    }
}

/// A decoder.
struct Decoded<R>(R);

impl<R: Read> Input for Decoded<R> {
    fn read_into(&mut self, piece: &mut Vec<u8>) -> std::io::Result<usize> {
        let room = (piece.capacity() - piece.len()) as u64;
        (&mut self.0).take(room).read_to_end(piece)
    }

    fn other_length(path: &Path, header: &Header, found: &str) -> Error {
        let reason = format!("it decodes to {found} bytes, {} expected", header.raw_len);
        Error::WrongBytes { path: path.to_owned(), digest: header.digest, code: ErrorCode::LengthMismatch, reason }
    }
}

impl Directory {
    fn write_frame(&self, item: &Item, output: &mut Output) -> std::result::Result<(), Stop> {
        let Some(relative) = self.file_of(&item.digest) else {
            let document = self.documents.get(&item.digest).ok_or_else(|| Error::Internal(format!("{} was not read", item.digest)))?;
            return output.append(&document_frame(document));
        };
        let size = item.size.ok_or_else(|| Error::Internal(format!("the size of {} is not known", item.digest)))?;
        let raw = Header { codec: Codec::Raw, kind: Kind::Blob, digest: item.digest, raw_len: size, stored_len: size };
        let path = self.root.path().join(&relative);
        let (file, len) = match self.root.file(&relative) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return self.write_encoded(&raw, item.elements, &relative, output);
            }
            other => other?,
        };
        if len != size {
            return Err(Error::Changed { path, reason: format!("it had {size} bytes, now it has {len}") }.into());
        }
        output.blob(&raw, item.elements, &path, file)
    }

    fn write_encoded(&self, raw: &Header, elements: Option<Dtype>, relative: &Path, output: &mut Output) -> std::result::Result<(), Stop> {
        let relative: PathBuf = layout::encoded(relative);
        let path = self.root.path().join(&relative);
        let (file, len) = self.root.file(&relative)?;
        let Shape { plain, raw_len } = zstd_frame::shape(&file, len).map_err(Error::io("read", &path))?;
        if plain && raw_len.is_some_and(|found| found != raw.raw_len) {
            let (document, at) = (path.clone(), "its zstd header".to_owned());
            return Err(Error::WrongLength { path, document, at, expected: raw.raw_len, found: raw_len.unwrap_or(0) }.into());
        }
        let as_it_is = Header { codec: Codec::Zstd, stored_len: len, ..*raw };
        // The parser of frames refuses here what the registry would refuse.
        if plain && Header::parse_exact(&as_it_is.to_bytes(), 0, self.limits()).is_ok() {
            return output.frame(&as_it_is, &path, file);
        }
        let decoder = zstd_frame::decoder(file).map_err(Error::io("decode", &path))?;
        output.blob(raw, elements, &path, Decoded(decoder.take(raw.raw_len + 1)))
    }
}
