//! Streams of frames, in both directions, with a watch over silence.

use super::send::words;
use super::{FrameSource, Remote, backoff};
use crate::error::Result;
use crate::slot::Slot;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::{Digest, RepositoryName, api, media_type};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Body, Method, Response, Url};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A stream of frames with an end mark. An error ends it without one.
pub type BoxFrames = BoxStream<'static, Result<Bytes>>;

impl Remote {
    /// Frames of `digests`, in that order, with an end mark. Nothing about the bytes is verified.
    ///
    /// # Errors
    /// `blob_unknown` before the first byte; a stream that is cut ends with [`crate::Error::Cut`].
    pub async fn frames(&self, repository: &RepositoryName, digests: Vec<Digest>) -> Result<BoxFrames> {
        let url = self.repository_path(repository, &["frames"]);
        let response = self.request(self.with_json(Method::POST, url, &api::FramesRequest { digests })?).await?;
        let remote = self.clone();
        let idle = self.options.idle_timeout;
        let pieces = stream::try_unfold(response, move |mut response| {
            let remote = remote.clone();
            async move {
                match tokio::time::timeout(idle, response.chunk()).await {
                    Err(_) => Err(remote.cut(format!("no byte for {} seconds", idle.as_secs()))),
                    Ok(Err(error)) => Err(remote.cut(words(&error))),
                    Ok(Ok(piece)) => Ok(piece.map(|piece| (piece, response))),
                }
            }
        });
        Ok(pieces.boxed())
    }

    /// Sends a body of frames, made anew for every try.
    pub(super) async fn upload(&self, url: Url, frames: &impl FrameSource) -> Result<Response> {
        let mut failures = 0;
        loop {
            self.round_trips.fetch_add(1, Ordering::Relaxed);
            let (error, retry_after) = match self.upload_once(url.clone(), frames(), failures + 1).await {
                Ok(response) if response.status().is_success() => return Ok(response),
                Ok(response) => self.refusal(response).await,
                Err(error) => (error, None),
            };
            failures += 1;
            match backoff::after(&error, retry_after, failures, self.options.retries, self.options.longest_wait) {
                None => return Err(error),
                Some(wait) => {
                    tracing::debug!(%error, wait_ms = wait.as_millis(), failures, "sending frames again");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn upload_once(&self, url: Url, frames: BoxFrames, attempt: u32) -> Result<Response> {
        let own = Slot::default();
        let moved = Arc::new(AtomicU64::new(0));
        let body = {
            let (own, moved) = (own.clone(), Arc::clone(&moved));
            // hyper takes the next piece when the socket has room, so pieces taken are bytes moved.
            frames
                .inspect_ok(move |piece| {
                    moved.fetch_add(piece.len() as u64, Ordering::Relaxed);
                })
                .map_err(move |error| own.keep(error))
        };
        let request = self.client.put(url).header(CONTENT_TYPE, media_type::FRAMES).body(Body::wrap_stream(body)).send();
        let idle = self.options.idle_timeout;
        let watch = async {
            loop {
                let before = moved.load(Ordering::Relaxed);
                tokio::time::sleep(idle).await;
                if moved.load(Ordering::Relaxed) == before {
                    return;
                }
            }
        };
        let result = tokio::select! {
            result = request => result,
            () = watch => return Err(self.silent(idle, attempt)),
        };
        // A file that cannot be read cuts the request; the cut is not the cause.
        if let Some(error) = own.take() {
            return Err(error);
        }
        result.map_err(|e| self.unreachable(&e, attempt))
    }
}
