//! The socket for engines: each connection registers one member, then both sides call.

use super::link::SocketLink;
use super::{Answers, Attached, Engines, Inner, wire};
use crate::error::{Error, Result, blocking, cuda_handle};
use crate::memory::{MemoryError, PageMemory, ShmMemory, cuda};
use pfr_schema::ErrorCode;
use pfr_schema::engine::{CallError, Memory, MemoryKind, Message, Register, Registered, ToAgent, ToEngine, binary, packed};
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 1024;
/// Calls of one member that are being answered at a time; more are refused.
const MAX_CALLS: usize = 32;

pub(super) async fn serve(engines: Engines, answers: Arc<dyn Answers>, socket: &Path) -> Result<()> {
    let (listener, _unlink) = crate::socket::bind(socket)?;
    // Dropped with this future, and with it every session.
    let mut sessions = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = sessions.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) if sessions.len() < MAX_CONNECTIONS => {
                pfr_service::task::spawn_in(&mut sessions, session(engines.clone(), Arc::clone(&answers), stream));
            }
            Ok(_) => tracing::warn!(limit = MAX_CONNECTIONS, "engine connection refused: too many connections"),
            Err(error) => {
                // Usually the process is out of descriptors. A session that ends releases some.
                tracing::warn!(%error, "cannot accept an engine connection");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn session(engines: Engines, answers: Arc<dyn Answers>, stream: UnixStream) {
    if let Err(reason) = admit(&stream) {
        tracing::warn!(reason, "engine connection refused");
        return;
    }
    let timeout = engines.0.timeout;
    let first = match tokio::time::timeout(timeout, wire::read_first(&stream)).await {
        Ok(Ok(first)) => first,
        Ok(Err(error)) => return tracing::warn!(%error, "engine connection ended before it registered"),
        Err(_) => return tracing::warn!("engine connection timed out before it registered"),
    };
    let (reader, writer) = stream.into_split();
    let (link, mut writing) = SocketLink::new(writer);
    match register(&engines, first, &link).await {
        Ok((id, attached, engine, rank)) => {
            let answer = Registered { agent: env!("CARGO_PKG_VERSION").into(), fingerprint: attached.fingerprint() };
            link.answer(id, Ok(json!(answer))).await;
            answers.joined(&engine);
            if let Err(error) = converse(&engines, &answers, reader, &link, &engine, rank).await {
                tracing::warn!(engine, %error, "engine connection failed");
            }
            // The member takes its blocks back when it sees the end, so nothing may write there.
            if let Err(error) = attached.settle().await {
                tracing::error!(engine, %error, "cannot wait for copies");
            }
            drop(attached);
        }
        Err((id, error)) => {
            tracing::warn!(%error, "engine registration refused");
            link.answer(id, Err(call_error(&error))).await;
        }
    }
    // Queued messages are still sent; a member that does not read them in time is disconnected.
    link.close();
    drop(tokio::time::timeout(timeout, writing.join_next()).await);
}

/// Engines run as the agent's user, or as root.
fn admit(stream: &UnixStream) -> std::result::Result<(), String> {
    let peer = stream.peer_cred().map_err(|e| e.to_string())?.uid();
    let own = rustix::process::geteuid().as_raw();
    if peer != own && peer != 0 { Err(format!("user {peer} is neither {own} nor root")) } else { Ok(()) }
}

fn call_error(error: &Error) -> CallError {
    CallError { code: error.code(), detail: error.to_string() }
}

type Call = (u64, ToAgent);

fn read_call(message: Value) -> std::result::Result<Call, (u64, String)> {
    let kind = match &message {
        Value::Object(_) => "an object",
        Value::Array(_) => "an array",
        Value::String(_) => "a text",
        Value::Number(_) => "a number",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
    };
    let Value::Object(mut message) = message else {
        return Err((0, format!("a message is a JSON object, found {kind}")));
    };
    let id = message.get("id").and_then(Value::as_u64).unwrap_or(0);
    let mut take = |field: &str| message.get_mut(field).map(Value::take).unwrap_or_default();
    let parts = json!({"call": take("call"), "args": take("args")});
    let call = pfr_schema::json::from_value(parts);
    call.map(|call| (id, call)).map_err(|reason| (id, format!("the call makes no sense: {reason}")))
}

type Joined = (u64, Attached, String, u32);

async fn register(
    engines: &Engines,
    (message, descriptors): (Vec<u8>, Vec<OwnedFd>),
    link: &Arc<SocketLink>,
) -> std::result::Result<Joined, (u64, Error)> {
    let message = serde_json::from_slice(&message).map_err(|e| (0, Error::Invalid(format!("not JSON: {e}"))))?;
    let (id, call) = read_call(message).map_err(|(id, reason)| (id, Error::Invalid(reason)))?;
    let ToAgent::Register(register) = call else {
        return Err((id, Error::Invalid("the first message of a connection is register".into())));
    };
    let (engine, rank) = (register.engine.clone(), register.rank);
    let (engines, link) = (engines.clone(), Arc::clone(link));
    // Mapping memory can take a while on a device.
    let joined = blocking("registering", move || {
        super::register::check(&register)?;
        let memories = map(&engines, &register, descriptors)?;
        engines.attach(*register, memories, link)
    });
    joined.await.map(|attached| (id, attached, engine, rank)).map_err(|error| (id, error))
}

/// Maps the memories of a registration. Descriptors are used in order.
fn map(engines: &Engines, register: &Register, descriptors: Vec<OwnedFd>) -> Result<Vec<Arc<dyn PageMemory>>> {
    let wanted = register.memories.iter().filter(|memory| memory.kind != MemoryKind::CudaIpc).count();
    if wanted != descriptors.len() {
        let reason = format!("{wanted} descriptors are described, {} came", descriptors.len());
        return Err(Error::Protocol { engine: register.engine.clone(), reason });
    }
    let mut descriptors = descriptors.into_iter();
    register.memories.iter().map(|memory| Ok(map_one(engines, memory, &mut descriptors)?)).collect()
}

fn map_one(
    engines: &Engines,
    memory: &Memory,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
) -> std::result::Result<Arc<dyn PageMemory>, MemoryError> {
    let Inner { ring, available, .. } = &*engines.0;
    let mut descriptor = || {
        let missing = || MemoryError::Unreachable { what: "map shared memory", reason: "no descriptor".into() };
        descriptors.next().ok_or_else(missing)
    };
    let Memory { offset, bytes, .. } = *memory;
    let device = memory.device.as_deref().unwrap_or_default();
    match memory.kind {
        MemoryKind::PosixShm => ShmMemory::map(descriptor()?, offset, bytes, ring.clone(), available.clone()),
        MemoryKind::CudaVmm => cuda::open_vmm(descriptor()?, offset, bytes, device, ring.total()),
        MemoryKind::CudaIpc => {
            let wrong = || MemoryError::Unreachable { what: "open IPC handle", reason: "it is not 64 bytes in hex".into() };
            let handle = memory.handle.as_deref().and_then(cuda_handle).ok_or_else(wrong)?;
            cuda::open_ipc(handle, offset, bytes, device, ring.total())
        }
    }
}

/// Answers the member's calls and takes its answers until the connection ends.
async fn converse(
    engines: &Engines,
    answers: &Arc<dyn Answers>,
    mut reader: OwnedReadHalf,
    link: &Arc<SocketLink>,
    engine: &str,
    rank: u32,
) -> std::io::Result<()> {
    // Dropped with the connection: its answers have no receiver then.
    let mut calls = JoinSet::new();
    let room = Arc::new(Semaphore::new(MAX_CALLS));
    while let Some(message) = wire::read(&mut reader).await? {
        while calls.try_join_next().is_some() {}
        let (id, call) = match read_message(&message)? {
            Read::Call(id, call) => (id, call),
            Read::Answer(answer) => {
                link.take_answer(answer);
                continue;
            }
            Read::Refused(id, reason) => {
                link.answer(id, Err(call_error(&Error::Invalid(reason)))).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            let detail = format!("{MAX_CALLS} calls are open already");
            link.answer(id, Err(CallError { code: ErrorCode::Overloaded, detail })).await;
            continue;
        };
        let (engines, answers) = (engines.clone(), Arc::clone(answers));
        let (link, engine) = (Arc::clone(link), engine.to_owned());
        pfr_service::task::spawn_in(&mut calls, async move {
            let answer = dispatch(&engines, &*answers, &engine, rank, call).await;
            link.answer(id, answer.map_err(|error| call_error(&error))).await;
            drop(permit);
        });
    }
    Ok(())
}

/// A later message of a member.
enum Read {
    Call(u64, ToAgent),
    Answer(Message<ToEngine>),
    /// A call that makes no sense, and why.
    Refused(u64, String),
}

/// Reads a message in any of its forms. An error ends the connection.
fn read_message(message: &[u8]) -> std::io::Result<Read> {
    let invalid = |reason| std::io::Error::new(std::io::ErrorKind::InvalidData, reason);
    let (json, tokens) = match message.first() {
        Some(&binary::MATCH_KEYS) => {
            let (id, call) = binary::parse(message).map_err(invalid)?;
            return Ok(Read::Call(id, ToAgent::MatchKeys(call)));
        }
        Some(&packed::PACKED) => packed::split(message).map(|(json, tokens)| (json, Some(tokens))).map_err(invalid)?,
        _ => (message, None),
    };
    let message: Value = serde_json::from_slice(json)?;
    if message.get("call").is_none() {
        let mut answer = pfr_schema::json::from_value(message).map_err(invalid)?;
        if let Some(tokens) = tokens {
            packed::unpack_answer(&mut answer, tokens).map_err(invalid)?;
        }
        return Ok(Read::Answer(answer));
    }
    let unpacked = read_call(message).and_then(|(id, mut call)| match tokens.map(|tokens| packed::unpack_call(&mut call, tokens)) {
        Some(Err(reason)) => Err((id, reason)),
        _ => Ok((id, call)),
    });
    Ok(unpacked.map_or_else(|(id, reason)| Read::Refused(id, reason), |(id, call)| Read::Call(id, call)))
}

async fn dispatch(engines: &Engines, answers: &dyn Answers, engine: &str, rank: u32, call: ToAgent) -> Result<Value> {
    if matches!(call, ToAgent::Register(_)) {
        return Err(Error::Invalid("a connection registers one member".into()));
    }
    let engine = engines.get(engine)?;
    answers.answer(&engine, rank, call).await
}
