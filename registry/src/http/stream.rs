//! A connection that gives up on a client that does not receive its response, which would otherwise
//! hold the resources of its request for ever. It also checks the line ends of requests, see
//! [`crate::http::head`].

use crate::http::connections::Connection;
use crate::http::head::Heads;
use crate::http::timeout::{ClientTimeout, Pace};
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A TCP stream whose writes fail when the client is too slow. Reads of a body are timed in
/// [`crate::http::body`], where it is known that a read is wanted; hyper times those of headers.
pub(crate) struct Timed {
    stream: TcpStream,
    timeout: ClientTimeout,
    heads: Heads,
    connection: Arc<Connection>,
}

impl Timed {
    pub(crate) fn new(stream: TcpStream, pace: Pace, connection: Arc<Connection>) -> Self {
        Self { stream, timeout: ClientTimeout::new(pace), heads: Heads::default(), connection }
    }

    fn count(&mut self, written: Poll<Result<usize>>, cx: &mut Context<'_>) -> Poll<Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                self.timeout.moved(bytes);
                self.connection.set_receiving(true);
                Poll::Ready(Ok(bytes))
            }
            Poll::Pending => {
                self.connection.set_receiving(false);
                ready!(self.timeout.poll_expired(cx));
                Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not take the response")))
            }
            error => error,
        }
    }
}

impl AsyncRead for Timed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if self.connection.requests() > self.heads.ended() {
            // hyper saw a head that was not seen here, so the beginning of the next one is not
            // known.
            self.heads.stop();
        }
        self.heads.check(&mut buf.filled_mut()[before..]);
        Poll::Ready(read)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.count(written, cx)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.count(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
