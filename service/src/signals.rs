//! The signals that end a program, or have it read its files again.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::task::Poll;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// A signal that ends a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The terminal was closed. A server with files to read again is asked to do so.
    Hangup,
    /// Ctrl-C.
    Interrupt,
    /// A service manager, or `kill`.
    Terminate,
}

impl Signal {
    /// The exit code that a shell expects: 128 and the signal's number.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        128 + match self {
            Self::Hangup => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }

    fn kind(self) -> SignalKind {
        match self {
            Self::Hangup => SignalKind::hangup(),
            Self::Interrupt => SignalKind::interrupt(),
            Self::Terminate => SignalKind::terminate(),
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hangup => "SIGHUP",
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        })
    }
}

/// Catches signals from now on, instead of being ended by them.
struct Caught(Vec<(Signal, Stream)>);

impl Caught {
    fn of(signals: &[Signal]) -> io::Result<Self> {
        signals.iter().map(|kind| Ok((*kind, signal(kind.kind())?))).collect::<io::Result<_>>().map(Self)
    }

    async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            let ready = self.0.iter_mut().find_map(|(kind, stream)| stream.poll_recv(context).is_ready().then_some(*kind));
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Completes at the first signal that ends a command.
///
/// # Errors
/// Signals cannot be caught.
pub fn of_command() -> io::Result<impl Future<Output = Signal>> {
    let mut caught = Caught::of(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup])?;
    Ok(async move { caught.next().await })
}

/// The signals that ask a server to read its files again. From now on a closed terminal does not
/// end it.
///
/// # Errors
/// Signals cannot be caught.
pub fn hangups() -> io::Result<Stream> {
    signal(SignalKind::hangup())
}

/// Completes at the first signal that ends a server. A second one ends the process at once.
///
/// # Errors
/// Signals cannot be caught.
pub fn of_server() -> io::Result<impl Future<Output = Signal>> {
    let mut caught = Caught::of(&[Signal::Terminate, Signal::Interrupt])?;
    Ok(async move {
        let first = caught.next().await;
        tracing::info!(signal = %first, "stopping; a second signal stops at once");
        crate::task::spawn(async move {
            let second = caught.next().await;
            tracing::warn!(signal = %second, "second signal: stopping at once");
            std::process::exit(1);
        });
        first
    })
}
