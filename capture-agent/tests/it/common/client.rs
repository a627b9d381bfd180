//! The engine's end of the socket, by hand.

use super::engine::Core;
use pfr_agent::memory::{PageMemory as _, Span};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;

pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub async fn connect(socket: &Path) -> Self {
        Self { stream: UnixStream::connect(socket).await.unwrap() }
    }

    /// Sends a message; the descriptors go with its first byte.
    pub async fn send(&mut self, message: &Value, descriptors: &[&OwnedFd]) {
        let json = serde_json::to_vec(message).unwrap();
        let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
        bytes.extend(json);
        self.send_bytes(&bytes, descriptors).await;
    }

    pub async fn send_bytes(&mut self, bytes: &[u8], descriptors: &[&OwnedFd]) {
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        let (first, rest) = bytes.split_at(1);
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !borrowed.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
            }
            Ok(rustix::net::sendmsg(&self.stream, &[IoSlice::new(first)], &mut ancillary, SendFlags::empty())?)
        };
        assert_eq!(self.stream.async_io(Interest::WRITABLE, send).await.unwrap(), 1);
        // The other side may have heard enough.
        drop(self.stream.write_all(rest).await);
    }

    /// The next message; `None` when the agent has closed the connection.
    pub async fn receive(&mut self) -> Option<Value> {
        let mut prefix = [0; 4];
        self.stream.read_exact(&mut prefix).await.ok()?;
        let mut json = vec![0; u32::from_le_bytes(prefix) as usize];
        self.stream.read_exact(&mut json).await.ok()?;
        Some(serde_json::from_slice(&json).unwrap())
    }

    /// Registers, and returns the answer.
    pub async fn register(&mut self, register: &Value, descriptors: &[&OwnedFd]) -> Option<Value> {
        self.send(&json!({"id": 1, "call": "register", "args": register}), descriptors).await;
        self.receive().await
    }

    /// Answers the agent's calls as the synthetic engine does, until the agent closes the
    /// connection.
    pub async fn obey(mut self, core: Arc<Core>) {
        while let Some(message) = self.receive().await {
            let id = message["id"].clone();
            let call = serde_json::from_value(json!({"call": message["call"], "args": message["args"]})).unwrap();
            let answer = match core.answer(call) {
                Ok(ok) => json!({"id": id, "ok": ok}),
                Err(error) => json!({"id": id, "error": error}),
            };
            self.send(&answer, &[]).await;
        }
    }
}

/// A memfd that holds a copy of a synthetic engine's memory.
pub fn memfd(name: &str, core: &Core, rank: usize) -> OwnedFd {
    let memory = &core.memories[rank];
    memfd_of(name, &memory.get(Span { offset: 0, bytes: memory.size() }))
}

pub fn memfd_of(name: &str, bytes: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes.len() as u64).unwrap();
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&fd, &bytes[at..], at as u64).unwrap();
    }
    fd
}
