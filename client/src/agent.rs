//! The capture agent of this host: its control interface over a Unix socket.

use crate::boxed;
use crate::error::{Error, Result};
use crate::remote::{reason, traced};
use pfr_schema::agent::{
    EngineInfo, Engines, Fits, Job, JobRequest, Jobs, Outline, Pushes, RestoreReport, RestoreRequest, Restores, Sequences, SnapshotReport,
    SnapshotRequest,
};
use pfr_schema::api::Problem;
use reqwest::{RequestBuilder, Url};
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most bytes of an answer.
const ANSWER_MAX: usize = 64 << 20;
/// How long an answer may take that the agent has at hand, without asking an engine or a registry.
const AT_HAND: Duration = Duration::from_secs(30);

/// A client of one agent. No request is retried: a repeated snapshot would be a second one.
#[derive(Clone, Debug)]
pub struct AgentClient {
    socket: PathBuf,
    http: reqwest::Client,
}

impl AgentClient {
    /// A client of the agent whose control socket is `socket`. Sends nothing yet.
    ///
    /// # Errors
    /// [`Error::Internal`] if the HTTP client cannot be built.
    pub fn new(socket: impl Into<PathBuf>) -> Result<Self> {
        let socket = socket.into();
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .unix_socket(socket.clone())
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|e| Error::Internal(e.to_string()))?;
        Ok(Self { socket, http })
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// All engines, by name.
    ///
    /// # Errors
    /// Of every method here: [`Error::NoAgent`], [`Error::AgentGone`], [`Error::NotAnAgent`], or
    /// [`Error::Agent`] with the agent's message. [`Error::AgentSilent`] after 30 seconds, of those
    /// that list something or describe one thing; [`Self::sequences`] asks the engine.
    #[boxed]
    pub async fn engines(&self) -> Result<Engines> {
        self.ask_at_hand(self.http.get(url(&["engines"])?)).await
    }

    /// Whether the agent works and reaches its store.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn ready(&self) -> Result<()> {
        let url = Url::parse("http://agent/readyz").map_err(|e| Error::Internal(e.to_string()))?;
        self.answer(self.http.get(url)).await.map(drop)
    }

    /// One engine.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn engine(&self, engine: &str) -> Result<EngineInfo> {
        self.ask_at_hand(self.http.get(url(&["engines", engine])?)).await
    }

    /// The sequences of an engine that can be captured, and the saves that its requests asked for.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn sequences(&self, engine: &str) -> Result<Sequences> {
        self.ask(self.http.get(url(&["engines", engine, "sequences"])?)).await
    }

    /// Takes a snapshot of a sequence.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn snapshot(&self, engine: &str, request: &SnapshotRequest) -> Result<SnapshotReport> {
        self.ask(self.http.post(url(&["engines", engine, "snapshots"])?).json(request)).await
    }

    /// Restores a snapshot into an engine.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn restore(&self, engine: &str, request: &RestoreRequest) -> Result<RestoreReport> {
        self.ask(self.http.post(url(&["engines", engine, "restores"])?).json(request)).await
    }

    /// The last restores into an engine, or into all engines, those that have left too, and what
    /// became of the states that lay ready: newest first, `limit` of them at most.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn restores(&self, engine: Option<&str>, limit: u32) -> Result<Restores> {
        let mut address = match engine {
            Some(engine) => url(&["engines", engine, "restores"])?,
            None => url(&["restores"])?,
        };
        address.query_pairs_mut().append_pair("limit", &limit.to_string());
        self.ask_at_hand(self.http.get(address)).await
    }

    /// The queue of pushes, oldest first.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn pushes(&self) -> Result<Pushes> {
        self.ask_at_hand(self.http.get(url(&["pushes"])?)).await
    }

    /// Whether a snapshot fits an engine, by what a registry says of it.
    ///
    /// # Errors
    /// As [`Self::engines`]; the agent's message says what differs.
    #[boxed]
    pub async fn check(&self, engine: &str, outline: &Outline) -> Result<Fits> {
        self.ask(self.http.post(url(&["engines", engine, "checks"])?).json(outline)).await
    }

    /// Begins a job, or only plans it. The job goes on by itself.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn begin(&self, request: &JobRequest) -> Result<Job> {
        self.ask(self.http.post(url(&["jobs"])?).json(request)).await
    }

    /// The jobs, oldest first.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn jobs(&self) -> Result<Jobs> {
        self.ask_at_hand(self.http.get(url(&["jobs"])?)).await
    }

    /// One job.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn job(&self, id: &str) -> Result<Job> {
        self.ask_at_hand(self.http.get(url(&["jobs", id])?)).await
    }

    /// Cancels a job, and returns it when it has ended.
    ///
    /// # Errors
    /// As [`Self::engines`].
    #[boxed]
    pub async fn cancel(&self, id: &str) -> Result<Job> {
        self.ask(self.http.delete(url(&["jobs", id])?)).await
    }

    async fn ask<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let body = self.answer(request).await?;
        serde_json::from_slice(&body).map_err(|e| self.foreign(format!("its answer cannot be read: {e}")))
    }

    /// [`Self::ask`] for an answer that the agent has at hand: an agent that hangs is not waited
    /// for.
    async fn ask_at_hand<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let silent = |_| Error::AgentSilent { socket: self.socket.clone(), limit: AT_HAND };
        tokio::time::timeout(AT_HAND, self.ask(request)).await.map_err(silent)?
    }

    /// The body of an answer that is not an error.
    async fn answer(&self, request: RequestBuilder) -> Result<Vec<u8>> {
        let mut answer = traced::send(request, 1).await.map_err(|e| self.silent(&e))?;
        let status = answer.status();
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(|e| self.silent(&e))? {
            if body.len() + chunk.len() > ANSWER_MAX {
                return Err(self.foreign(format!("its answer has more than {ANSWER_MAX} bytes")));
            }
            body.extend_from_slice(&chunk);
        }
        if status.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => Err(Error::Agent { problem: Box::new(problem) }),
            Err(_) => Err(self.foreign(format!("it answered {} without a problem document", status.as_u16()))),
        }
    }

    fn silent(&self, error: &reqwest::Error) -> Error {
        if error.is_connect() && is_denied(error) {
            return Error::io("reach the capture agent at", &self.socket)(io::ErrorKind::PermissionDenied.into());
        }
        let (socket, reason) = (self.socket.clone(), reason(error));
        if error.is_connect() { Error::NoAgent { socket, reason } } else { Error::AgentGone { socket, reason } }
    }

    fn foreign(&self, reason: String) -> Error {
        Error::NotAnAgent { socket: self.socket.clone(), reason }
    }
}

/// The address of a resource. Each segment is escaped: an engine may have any name.
fn url(segments: &[&str]) -> Result<Url> {
    let mut url = Url::parse("http://agent/v1").map_err(|e| Error::Internal(e.to_string()))?;
    url.path_segments_mut().map_err(|()| Error::Internal("an address without a path".to_owned()))?.extend(segments);
    Ok(url)
}

/// Whether this user may not open the socket.
fn is_denied(error: &reqwest::Error) -> bool {
    let denied = |error: &&(dyn std::error::Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source()).any(|error| denied(&error))
}
