//! Streams of frames, in both directions, with a limit on silence.

use super::backoff::Tries;
use super::pace::{self, Pace};
use super::send::reason;
use super::{FrameSource, Remote, traced};
use crate::boxed;
use crate::error::{Error, Result};
use crate::slot::Slot;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::{CODECS_HEADER, Codecs};
use pfr_schema::{Digest, Limits, RepositoryName, api, media_type};
use pfr_store::in_codecs;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Body, Method, Response, Url};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

/// A stream of frames with an end mark. An error ends it without one.
pub type BoxFrames = BoxStream<'static, Result<Bytes>>;

/// The types that a client accepts if it can reach the storage.
const EITHER: &str = "application/vnd.pf.frame-locations.v1+json, application/vnd.pf.frames.v1";
/// Bytes of an answer with locations at most.
const LOCATIONS: usize = 64 << 20;
/// Smaller pieces are put together, into pieces of [`PIECE`].
const SMALL: usize = 64 << 10;
/// Bytes of such a piece.
const PIECE: usize = 256 << 10;

impl Remote {
    /// Frames of `digests`, in that order, with an end mark: from the registry, or from where it
    /// says that they lie. Those in other codecs than these become raw: in the registry, or here if
    /// it is of a version that does not do that. Nothing about the bytes is verified.
    ///
    /// # Errors
    /// `blob_unknown` before the first byte; a stream that is cut ends with [`crate::Error::Cut`].
    #[boxed]
    pub async fn frames(&self, repository: &RepositoryName, digests: Vec<Digest>, codecs: Codecs) -> Result<BoxFrames> {
        let frames = in_codecs(self.frames_as_sent(repository, digests, codecs).await?, codecs, &Limits::default());
        let Some(brake) = self.brake.clone() else { return Ok(frames) };
        let held_back = frames.and_then(move |piece| {
            let wait = brake.hold(piece.len() as u64);
            async move {
                wait.await;
                Ok(piece)
            }
        });
        Ok(held_back.boxed())
    }

    async fn frames_as_sent(&self, repository: &RepositoryName, digests: Vec<Digest>, codecs: Codecs) -> Result<BoxFrames> {
        let url = self.repository_path(repository, &["frames"]);
        let request = api::FramesRequest { digests };
        let build = self.with_json(Method::POST, url, &request)?;
        let accept = if self.direct.open() { EITHER } else { media_type::FRAMES };
        let response = self.request(|| build().header(ACCEPT, accept).header(CODECS_HEADER, codecs.to_string())).await?;
        if response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(media_type::FRAME_LOCATIONS.as_bytes())) {
            let locations = self.parse(&self.read(response, LOCATIONS).await?)?;
            return self.fetch_located(locations, &request.digests);
        }
        let incoming = Incoming { remote: self.clone(), response, pace: Pace::new(&self.options), held: BytesMut::new(), ended: None };
        let pieces = stream::try_unfold(incoming, |mut incoming| async move { Ok(incoming.next().await?.map(|piece| (piece, incoming))) });
        Ok(pieces.boxed())
    }

    /// Sends a body of frames, made anew for every try.
    pub(super) async fn upload(&self, url: Url, frames: &impl FrameSource) -> Result<Response> {
        let mut tries = Tries::of(self);
        loop {
            self.round_trips.fetch_add(1, Ordering::Relaxed);
            let (error, retry_after) = match self.upload_once(url.clone(), frames(), tries.failures() + 1).await {
                Ok(response) if response.status().is_success() => {
                    self.answered();
                    return Ok(response);
                }
                Ok(response) => self.refusal(response).await,
                Err(error) => (error, None),
            };
            tries.again(error, retry_after).await?;
        }
    }

    async fn upload_once(&self, url: Url, frames: BoxFrames, attempt: u32) -> Result<Response> {
        let own = Slot::default();
        let (moved, sent) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let body = {
            let (own, moved, sent) = (own.clone(), Arc::clone(&moved), Arc::clone(&sent));
            let end = stream::poll_fn(move |_| {
                sent.store(true, Ordering::Relaxed);
                Poll::Ready(None)
            });
            // hyper takes the next piece when the socket has room, so pieces taken are bytes moved.
            frames
                .chain(end)
                .inspect_ok(move |piece| {
                    moved.fetch_add(piece.len() as u64, Ordering::Relaxed);
                })
                .map_err(move |error| own.keep(error))
        };
        let request = self.client.put(url).header(CONTENT_TYPE, media_type::FRAMES).body(Body::wrap_stream(body));
        let request = traced::send(request, attempt);
        let idle = self.options.idle_timeout;
        let least = pace::least(&self.options).max(1);
        let watch = async {
            loop {
                let (before, was_sent) = (moved.load(Ordering::Relaxed), sent.load(Ordering::Relaxed));
                tokio::time::sleep(idle).await;
                let now = moved.load(Ordering::Relaxed) - before;
                // A complete request waits for its answer, for as long again.
                if was_sent || (!sent.load(Ordering::Relaxed) && now < least) {
                    return now;
                }
            }
        };
        let result = tokio::select! {
            result = request => result,
            now = watch => {
                let reason = match now {
                    0 => return Err(self.silent(idle, attempt)),
                    now => format!("it took {now} bytes in {} seconds, expected at least {least}", idle.as_secs()),
                };
                return Err(Error::Unreachable { url: self.url().to_owned(), reason, attempts: attempt });
            }
        };
        // A file that cannot be read cuts the request; the cut is not the cause.
        if let Some(error) = own.take() {
            return Err(error);
        }
        result.map_err(|e| self.unreachable(&e, attempt))
    }
}

/// The body of an answer, in pieces large enough to be handed to another task: a registry may send
/// a large blob in pieces of a few KiB.
struct Incoming {
    remote: Remote,
    response: Response,
    pace: Pace,
    held: BytesMut,
    ended: Option<Result<()>>,
}

impl Incoming {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if self.held.len() >= PIECE || (self.ended.is_some() && !self.held.is_empty()) {
                return Ok(Some(self.held.split().freeze()));
            }
            if let Some(end) = &mut self.ended {
                return std::mem::replace(end, Ok(())).map(|()| None);
            }
            match self.receive().await {
                Ok(Some(piece)) if self.held.is_empty() && piece.len() >= SMALL => return Ok(Some(piece)),
                Ok(Some(piece)) => self.held.extend_from_slice(&piece),
                // The bytes before an end or an error are handed on first.
                Ok(None) => self.ended = Some(Ok(())),
                Err(error) => self.ended = Some(Err(error)),
            }
        }
    }

    async fn receive(&mut self) -> Result<Option<Bytes>> {
        match self.pace.next(self.response.chunk()).await {
            Err(slow) => Err(self.remote.slow(slow)),
            Ok(Err(error)) => Err(self.remote.cut(reason(&error))),
            Ok(Ok(piece)) => Ok(piece),
        }
    }
}
