//! The engine's end of the connection to a capture agent: registers, hands calls over, and comes
//! back when the agent does.
//!
//! One thread reads. The receiver of the events answers on the stream that came with
//! [`Event::Attached`]. Nothing here waits for the engine, and the engine never waits for this.

mod frame;

pub use frame::{FrameError, receive, receive_with_descriptors, send};

use pfr_schema::engine::{CallError, Message, Register, Registered, ToAgent, ToEngine};
use pfr_schema::error::ErrorCode;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// First pause before another attempt; each failed one doubles it.
const SHORTEST: Duration = Duration::from_millis(20);
/// Longest pause before another attempt.
const LONGEST: Duration = Duration::from_secs(1);
/// If the agent does not accept an answer for this long, the connection is closed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What happens on the connection. Connections are numbered from 1.
#[derive(Debug)]
pub enum Event {
    /// The agent has accepted the registration.
    Attached {
        /// Number of the connection.
        connection: u64,
        /// The agent's answer.
        registered: Registered,
        /// Where answers go.
        stream: UnixStream,
    },
    /// The agent has refused the registration, which is tried again later.
    Refused(CallError),
    /// The agent calls.
    Call {
        /// Number of the connection.
        connection: u64,
        /// The call's id.
        id: u64,
        /// The call.
        call: ToEngine,
    },
    /// An accepted connection has ended.
    Detached {
        /// Number of the connection.
        connection: u64,
        /// The reason, for people.
        reason: String,
    },
}

/// Connects to `socket` again and again, until `deliver` returns `false`. Blocks: give it a thread.
pub fn run(socket: &Path, register: &Register, descriptors: &[OwnedFd], deliver: impl Fn(Event) -> bool) {
    let mut wait = SHORTEST;
    for connection in 1.. {
        let end = session(socket, register, descriptors, connection, &deliver);
        let go_on = match end {
            End::Deaf => false,
            End::Unreached => true,
            End::Refused(failure) => deliver(Event::Refused(failure)),
            End::Lost(error) => {
                wait = SHORTEST;
                deliver(Event::Detached { connection, reason: error.to_string() })
            }
        };
        if !go_on {
            return;
        }
        std::thread::sleep(wait);
        wait = LONGEST.min(wait * 2);
    }
}

enum End {
    /// The receiver of events is gone.
    Deaf,
    /// There is no agent, or it left before it answered.
    Unreached,
    Refused(CallError),
    Lost(FrameError),
}

fn session(socket: &Path, register: &Register, descriptors: &[OwnedFd], connection: u64, deliver: &impl Fn(Event) -> bool) -> End {
    let Ok((mut stream, answers)) = open(socket) else { return End::Unreached };
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let call = Message::Call { id: 1, call: ToAgent::Register(Box::new(register.clone())) };
    if send(&stream, &call, &borrowed).is_err() {
        return End::Unreached;
    }
    let registered = match receive::<ToEngine>(&mut stream) {
        Ok(Message::Ok { id: 1, ok }) => serde_json::from_value(ok).map_err(|error| format!("answered {error}")),
        Ok(Message::Error { id: 1, error }) => return End::Refused(error),
        Ok(_) => Err("did not answer the registration".to_owned()),
        Err(_) => return End::Unreached,
    };
    let registered = match registered {
        Ok(registered) => registered,
        Err(detail) => return End::Refused(CallError { code: ErrorCode::Internal, detail: format!("the agent {detail}") }),
    };
    if !deliver(Event::Attached { connection, registered, stream: answers }) {
        return End::Deaf;
    }
    loop {
        match receive::<ToEngine>(&mut stream) {
            Ok(Message::Call { id, call }) => {
                if !deliver(Event::Call { connection, id, call }) {
                    return End::Deaf;
                }
            }
            // This engine calls nothing but `register`.
            Ok(Message::Ok { .. } | Message::Error { .. }) => {}
            Err(error) => {
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return End::Lost(error);
            }
        }
    }
}

fn open(socket: &Path) -> std::io::Result<(UnixStream, UnixStream)> {
    let stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let answers = stream.try_clone()?;
    Ok((stream, answers))
}
