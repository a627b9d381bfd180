//! Ctrl-C, a polite kill and a closed terminal end a command cleanly: what runs is dropped, child processes with it.

use super::failure::Failure;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves when the command is to end, with the exit code that a shell expects: 128 and the signal's number.
pub async fn interrupted(farewell: &str) -> Failure {
    let number = tokio::select! {
        () = next(SignalKind::interrupt()) => 2,
        () = next(SignalKind::terminate()) => 15,
        () = next(SignalKind::hangup()) => 1,
    };
    Failure::interrupted(128 + number, format!("interrupted; {farewell}"))
}

async fn next(kind: SignalKind) {
    match signal(kind) {
        Ok(mut stream) => {
            stream.recv().await;
        }
        // Then the signal keeps its default: it ends the process.
        Err(_) => std::future::pending().await,
    }
}
