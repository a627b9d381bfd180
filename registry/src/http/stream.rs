//! The bytes of a connection, in layers:
//!
//! * [`Timed`] gives up on a client that does not receive its response, which would otherwise hold
//!   the resources of its request for ever. It counts bytes on the wire: inside TLS a flush may
//!   wait for the client, too.
//! * TLS, if the registry has a certificate.
//! * [`Lines`] checks the line ends of requests, see [`crate::http::head`].

use crate::http::connections::Connection;
use crate::http::head::Heads;
use crate::http::timeout::{ClientTimeout, Pace};
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// A TCP stream whose writes fail when the client is too slow. Reads of a body are timed in
/// [`crate::http::body`], where it is known that a read is wanted; hyper times those of headers.
pub(crate) struct Timed {
    stream: TcpStream,
    timeout: ClientTimeout,
    connection: Arc<Connection>,
}

impl Timed {
    pub(crate) fn new(stream: TcpStream, pace: Pace, connection: Arc<Connection>) -> Self {
        Self { stream, timeout: ClientTimeout::new(pace), connection }
    }

    /// For a look at the first byte: it stays there to be read.
    pub(crate) fn tcp(&self) -> &TcpStream {
        &self.stream
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
        Pin::new(&mut self.stream).poll_read(cx, buf)
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

/// What carries requests. One type for both, so that what is above it is compiled once.
pub(crate) enum Transport {
    Plain(Timed),
    Tls(Box<TlsStream<Timed>>),
}

macro_rules! pass {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut *$self {
            Transport::Plain($stream) => $call,
            Transport::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Transport {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        pass!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        pass!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        pass!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        pass!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        pass!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

/// Spoils bare line feeds in the heads of requests, and ends the input at one between chunks.
pub(crate) struct Lines {
    stream: Transport,
    heads: Heads,
    connection: Arc<Connection>,
}

impl Lines {
    pub(crate) fn new(stream: Transport, connection: Arc<Connection>) -> Self {
        Self { stream, heads: Heads::default(), connection }
    }
}

impl AsyncRead for Lines {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if self.heads.are_broken() {
            return Poll::Ready(Err(Error::new(ErrorKind::InvalidData, "a line feed without a carriage return between chunks")));
        }
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if self.connection.requests() > self.heads.ended() {
            // hyper saw a head that was not seen here, so the beginning of the next one is not
            // known.
            self.heads.stop();
        }
        let passed = self.heads.check(&mut buf.filled_mut()[before..]);
        buf.set_filled(before + passed);
        if passed == 0 && self.heads.are_broken() {
            // hyper takes a read of no bytes for the end of the connection.
            return self.poll_read(cx, buf);
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Lines {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
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
