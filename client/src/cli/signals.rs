//! Ctrl-C and a polite kill end a command cleanly: what runs is dropped, children of the demo with it.

use super::failure::Failure;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves when the user wants the command to end.
pub async fn interrupted() -> Failure {
    let message = "interrupted; run the same command again to resume";
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut stream) => stream.recv().await,
            Err(_) => std::future::pending().await,
        };
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => Failure::plain(130, message),
        () = terminated => Failure::plain(143, message),
    }
}
