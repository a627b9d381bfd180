//! TLS handshakes, bounded in time and number.
//!
//! A connection counts among `max-connections` only after its handshake. Handshakes have places of
//! their own, and a new one takes the place of the oldest: so clients that connect and say nothing,
//! or a byte now and then, keep neither connections nor handshakes from others. An honest handshake
//! takes two round trips.

use crate::http::connections::{ConnectionSlots, Connections, Place, Places};
use crate::http::stream::{Timed, Transport};
use crate::http::timeout::Pace;
use crate::http::tls::Tls;
use crate::metrics as names;
use pfr_schema::ErrorCode;
use pfr_schema::api::Problem;
use pfr_service::problem;
use std::io::Result;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

/// Handshakes at once, each with about 30 KiB.
const HANDSHAKES: usize = 256;
/// Bytes of a request in plain HTTP that are read, so that the client sees the answer before the
/// connection is reset.
const DRAINED: u64 = 256 << 10;

/// The handshakes of a registry with a certificate.
pub(crate) struct Handshakes {
    pub(crate) tls: Arc<Tls>,
    slots: ConnectionSlots,
    /// How long one may take.
    limit: Duration,
    pace: Pace,
}

/// Why there was no handshake.
enum Failure {
    /// The client spoke plain HTTP, and was told.
    PlainHttp,
    /// The client ended the connection, or rustls refused what it sent.
    Refused(std::io::Error),
}

impl Handshakes {
    pub(crate) fn new(tls: Arc<Tls>, limit: Duration, queue: Duration, pace: Pace) -> Self {
        Self { tls, slots: ConnectionSlots::new(HANDSHAKES, queue), limit, pace }
    }

    /// Takes a connection through its handshake and into one of `places`. `entering` ends when the
    /// handshake has a place of its own. None if the connection ended before.
    pub(crate) async fn take(&self, stream: TcpStream, entering: OwnedSemaphorePermit, places: &Places) -> Option<(Transport, Place)> {
        let handshake = self.slots.enter().await?;
        drop(entering);
        let mut open = self.slots.connections.open();
        let stream = Timed::new(stream, self.pace, Arc::clone(&open.connection));
        let shaken = tokio::select! {
            shaken = tokio::time::timeout(self.limit, self.shake(stream)) => shaken,
            () = open.connection.closed() => return failed("pushed_out"),
        };
        let transport = match shaken {
            Ok(Ok(transport)) => transport,
            Ok(Err(Failure::PlainHttp)) => return failed("plain_http"),
            Ok(Err(Failure::Refused(error))) => {
                tracing::debug!(%error, "TLS handshake failed");
                return failed("refused");
            }
            Err(_) => return failed("timeout"),
        };
        let connection = Arc::clone(&open.connection);
        let moved = move |connections: &Arc<Connections>| {
            open.move_to(connections);
            open
        };
        let place = tokio::select! {
            place = places.enter(moved) => place?,
            () = connection.closed() => return failed("pushed_out"),
        };
        drop(handshake);
        Some((transport, place))
    }

    async fn shake(&self, mut stream: Timed) -> std::result::Result<Transport, Failure> {
        let mut first = [0];
        stream.tcp().peek(&mut first).await.map_err(Failure::Refused)?;
        // A handshake begins with 22, a request of HTTP with the name of its method.
        if first[0].is_ascii_alphabetic() {
            // The client may have left.
            let _ = refuse(&mut stream).await;
            return Err(Failure::PlainHttp);
        }
        let tls = self.tls.acceptor().accept(stream).await.map_err(Failure::Refused)?;
        Ok(Transport::Tls(Box::new(tls)))
    }
}

fn failed<T>(reason: &'static str) -> Option<T> {
    metrics::counter!(names::TLS_FAILED, "reason" => reason).increment(1);
    None
}

/// Answers a request in plain HTTP.
async fn refuse(stream: &mut Timed) -> Result<()> {
    let detail = "this port speaks https, not http: write https:// at the beginning of the registry's address";
    let problem = Problem::new(ErrorCode::InvalidRequest, detail);
    let body = serde_json::to_string(&problem)?;
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        problem::MEDIA_TYPE,
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    let mut rest = stream.take(DRAINED);
    let mut read = [0; 4096];
    while rest.read(&mut read).await? > 0 {}
    Ok(())
}
