//! Messages on a Unix socket: a `u32` little-endian length, that many bytes of JSON, and
//! descriptors with the first byte.

use pfr_schema::engine::{MAX_DESCRIPTORS, MAX_MESSAGE};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::io::{Error, ErrorKind, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use tokio::io::{AsyncReadExt as _, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;

/// Bytes by which a buffer grows, so that a large announced length allocates nothing.
const STEP: usize = 1 << 20;

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, reason.into())
}

fn length(prefix: [u8; 4]) -> Result<usize> {
    let length = u32::from_le_bytes(prefix);
    if length == 0 || length > MAX_MESSAGE {
        return Err(invalid(format!("a message of {length} bytes; 1 to {MAX_MESSAGE} are allowed")));
    }
    Ok(length as usize)
}

/// Reads the first message, with its descriptors.
pub(super) async fn read_first(stream: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let mut prefix = [0; 4];
    receive(stream, &mut prefix, &mut descriptors).await?;
    let length = length(prefix)?;
    let mut message = Vec::new();
    while message.len() < length {
        let at = message.len();
        message.resize((at + STEP).min(length), 0);
        receive(stream, &mut message[at..], &mut descriptors).await?;
    }
    Ok((message, descriptors))
}

/// Fills `buffer`; descriptors that come with its bytes are collected.
async fn receive(stream: &UnixStream, mut buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<()> {
    while !buffer.is_empty() {
        let read = stream.async_io(Interest::READABLE, || receive_some(stream, buffer, descriptors)).await?;
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        buffer = &mut buffer[read..];
    }
    Ok(())
}

fn receive_some(stream: &UnixStream, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > MAX_DESCRIPTORS {
        return Err(invalid(format!("more than {MAX_DESCRIPTORS} descriptors")));
    }
    Ok(received.bytes)
}

/// Reads a later message; `None` at the end of the connection. The kernel closes descriptors that
/// come with it.
pub(super) async fn read(stream: &mut OwnedReadHalf) -> Result<Option<Vec<u8>>> {
    let mut prefix = [0; 4];
    match stream.read(&mut prefix).await? {
        0 => return Ok(None),
        some => stream.read_exact(&mut prefix[some..]).await?,
    };
    let length = length(prefix)?;
    let mut message = Vec::new();
    while message.len() < length {
        let at = message.len();
        message.resize((at + STEP).min(length), 0);
        stream.read_exact(&mut message[at..]).await?;
    }
    Ok(Some(message))
}

/// A message as it is sent.
pub(super) fn encode(message: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = u32::try_from(bytes.len() - 4).ok().filter(|length| *length <= MAX_MESSAGE);
    let length = length.ok_or_else(|| invalid(format!("a message of {} bytes cannot be sent", bytes.len() - 4)))?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}
