//! Messages on a Unix stream: a length, JSON, and descriptors with the first byte.

use pfr_schema::engine::{MAX_DESCRIPTORS, MAX_MESSAGE, Message};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Why a message did not come or go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The other side has gone, at the end of a message.
    #[error("the connection was closed")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// A length over [`MAX_MESSAGE`].
    #[error("a message of {0} bytes, the limit is {MAX_MESSAGE}")]
    TooLarge(u64),
    /// Not a message of the protocol.
    #[error("not a message: {0}")]
    Json(#[from] serde_json::Error),
}

/// Sends a message; descriptors go with its first byte.
///
/// # Errors
/// [`FrameError::TooLarge`], [`FrameError::Io`].
pub fn send<C: Serialize>(mut stream: &UnixStream, message: &Message<C>, descriptors: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= MAX_MESSAGE).ok_or(FrameError::TooLarge(body.len() as u64))?;
    let bytes = [&length.to_le_bytes()[..], &body].concat();
    let mut sent = 0;
    if !descriptors.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(FrameError::Io(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors")));
        }
        sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
    }
    Ok(stream.write_all(&bytes[sent..])?)
}

/// Receives a message; nothing is taken for it before its bytes arrive.
///
/// # Errors
/// [`FrameError`].
pub fn receive<C: DeserializeOwned>(stream: &mut impl Read) -> Result<Message<C>, FrameError> {
    let mut length = [0; 4];
    if stream.read(&mut length[..1])? == 0 {
        return Err(FrameError::Closed);
    }
    stream.read_exact(&mut length[1..])?;
    body(stream, length)
}

/// Receives a message and the descriptors that came with it: the agent's end of [`send`].
///
/// # Errors
/// [`FrameError`].
pub fn receive_with_descriptors<C: DeserializeOwned>(mut stream: &UnixStream) -> Result<(Message<C>, Vec<OwnedFd>), FrameError> {
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut first = [IoSliceMut::new(&mut length[..1])];
    let received = recvmsg(stream, &mut first, &mut control, RecvFlags::CMSG_CLOEXEC).map_err(io::Error::from)?;
    let rights = control.drain().filter_map(|message| if let RecvAncillaryMessage::ScmRights(fds) = message { Some(fds) } else { None });
    let descriptors = rights.flatten().collect();
    if received.bytes == 0 {
        return Err(FrameError::Closed);
    }
    stream.read_exact(&mut length[1..])?;
    Ok((body(&mut stream, length)?, descriptors))
}

fn body<C: DeserializeOwned>(stream: &mut impl Read, length: [u8; 4]) -> Result<Message<C>, FrameError> {
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Err(FrameError::TooLarge(u64::from(length)));
    }
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body)?;
    if body.len() < length as usize {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::engine::{PinRequest, ToEngine};
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    fn framed(body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_le_bytes()[..], body].concat()
    }

    #[test]
    fn messages_and_descriptors_arrive() {
        let (here, there) = UnixStream::pair().unwrap();
        let message = Message::Call { id: 3, call: ToEngine::Pin(PinRequest { sequence: "seq-1".into() }) };
        let memory = crate::shared::SharedMemory::new("test", 4096).unwrap();
        send(&here, &message, &[memory.descriptor(), here.as_fd()]).unwrap();
        send(&here, &message, &[]).unwrap();
        drop(here);
        let (first, descriptors) = receive_with_descriptors::<ToEngine>(&there).unwrap();
        assert_eq!((first, descriptors.len()), (message.clone(), 2));
        drop(descriptors);
        assert_eq!(receive::<ToEngine>(&mut &there).unwrap(), message);
        assert!(matches!(receive::<ToEngine>(&mut &there), Err(FrameError::Closed)));
    }

    #[test]
    fn a_length_is_not_believed() {
        let mut huge = &[0xFF; 4][..];
        assert!(matches!(receive::<ToEngine>(&mut huge), Err(FrameError::TooLarge(0xFFFF_FFFF))));
        let mut cut = &[(MAX_MESSAGE).to_le_bytes().as_slice(), b"{}"].concat()[..];
        assert!(matches!(receive::<ToEngine>(&mut cut), Err(FrameError::Io(_))));
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_a_message_or_an_error(body in "[ -~]{0,80}", cut in 0_usize..90) {
            let bytes = framed(body.as_bytes());
            let mut bytes = &bytes[..cut.min(bytes.len())];
            let before = bytes.len();
            let result = receive::<ToEngine>(&mut bytes);
            prop_assert!(result.is_err() || before == body.len() + 4);
        }

        #[test]
        fn any_call_survives_the_wire(id: u64, sequence in ".{0,40}") {
            let message = Message::Call { id, call: ToEngine::Pin(PinRequest { sequence }) };
            let bytes = framed(&serde_json::to_vec(&message).unwrap());
            prop_assert_eq!(receive::<ToEngine>(&mut &bytes[..]).unwrap(), message);
        }
    }
}
