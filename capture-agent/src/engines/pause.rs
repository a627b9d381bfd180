//! Guards for what an engine grants to a capture: a pause, and pinned blocks.

use super::member::Member;
use super::view::View;
use crate::error::{Error, Result, few};
use pfr_schema::ErrorCode;
use pfr_schema::engine::{PauseRequest, PinRequest, Pinned, ResumeRequest, Resumed, Sequence, Table, TableRequest, ToEngine, Verb};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::OwnedMutexGuard;
use tokio::sync::oneshot;

/// How long a capture waits for the answer to `resume`, and the next capture for that.
pub(super) const GRACE: Duration = Duration::from_secs(60);

/// A paused engine. Dropping this resumes the engine, in a panic too. The engine goes on by itself
/// when the pause lasts too long, because this process may hang: then [`Pause::resume`] fails.
#[derive(Debug)]
pub struct Pause {
    view: Arc<View>,
    member: Arc<Member>,
    /// Told to the engine, so that it can say whether this pause held.
    name: String,
    since: Instant,
    /// When the engine goes on by itself.
    ends: Instant,
    /// Gone once the engine was told to go on.
    still: Option<OwnedMutexGuard<()>>,
    runtime: Handle,
}

impl Pause {
    pub(super) async fn begin(view: Arc<View>) -> Result<Self> {
        let member = Arc::clone(view.must_serve(Verb::Pause, "pause")?);
        let still = tokio::time::timeout(view.shared.timeout + GRACE, Arc::clone(&view.shared.still).lock_owned()).await;
        let with = || "a capture after which it has not gone on".to_owned();
        let still = still.map_err(|_| Error::Busy { engine: view.shared.name.clone(), with: with() })?;
        // Create the guard before the call: even if the call fails, the engine must be resumed.
        let (name, since, limit) = (uuid::Uuid::now_v7().to_string(), Instant::now(), view.shared.pause_limit);
        let mut pause = Self { view, member, name, since, ends: since + limit, still: Some(still), runtime: Handle::current() };
        let limit_ms = u64::try_from(limit.as_millis().max(1)).unwrap_or(u64::MAX);
        let call = ToEngine::Pause(PauseRequest { pause: pause.name.clone(), limit_ms });
        pause.member.call_within::<serde_json::Value>(pause.view.shared.timeout, call).await?;
        pause.since = Instant::now();
        Ok(pause)
    }

    /// Waits for `work`, which needs the pause, until the engine goes on by itself.
    ///
    /// # Errors
    /// [`Error::PauseEnded`], and those of `work`.
    pub async fn within<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match tokio::time::timeout_at(self.ends.into(), work).await {
            Ok(Ok(_)) if Instant::now() >= self.ends => Err(self.ended()),
            Ok(done) => done,
            Err(_) => Err(self.ended()),
        }
    }

    fn ended(&self) -> Error {
        Error::PauseEnded { engine: self.view.shared.name.clone(), seconds: self.view.shared.pause_limit.as_secs_f64() }
    }

    /// The one sequence asked for, or the only one there is. Checked: blocks exist, none is null
    /// where the window needs it, their number fits T.
    ///
    /// # Errors
    /// [`Error::SequenceUnknown`], [`Error::SequenceAmbiguous`], [`Error::Protocol`].
    pub async fn sequence(&self, sequence: Option<&str>) -> Result<Sequence> {
        let mut sequences = match self.table(sequence).await {
            // Engines may say so, or tell of none.
            Err(Error::Refused { failure, .. }) if failure.code == ErrorCode::SequenceUnknown => Vec::new(),
            other => other?,
        };
        let engine = self.view.shared.name.clone();
        let names = |sequences: &[Sequence]| few(sequences.iter().map(|s| s.id.as_str()));
        let at = match sequence {
            Some(name) => sequences.iter().position(|s| s.id == name),
            None if sequences.len() > 1 => return Err(Error::SequenceAmbiguous { engine, known: names(&sequences) }),
            None => (!sequences.is_empty()).then_some(0),
        };
        let Some(at) = at else {
            // The table of one sequence does not list the others.
            let known = if sequence.is_some() { self.table(None).await? } else { sequences };
            return Err(Error::SequenceUnknown { engine, sequence: sequence.unwrap_or_default().into(), known: names(&known) });
        };
        let found = sequences.swap_remove(at);
        self.view.check_sequence(&found)?;
        Ok(found)
    }

    /// All sequences, checked likewise.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub async fn sequences(&self) -> Result<Vec<Sequence>> {
        let sequences = self.table(None).await?;
        sequences.iter().try_for_each(|sequence| self.view.check_sequence(sequence))?;
        Ok(sequences)
    }

    async fn table(&self, sequence: Option<&str>) -> Result<Vec<Sequence>> {
        let member = self.view.must_serve(Verb::Table, "table")?;
        let call = ToEngine::Table(TableRequest { sequence: sequence.map(Into::into) });
        let table: Table = member.call_within(self.view.shared.timeout, call).await?;
        let mut seen = std::collections::HashSet::new();
        if let Some(twice) = table.sequences.iter().find(|s| !seen.insert(s.id.as_str())) {
            return Err(member.broke(format!("its table has sequence {:?} twice", twice.id)));
        }
        Ok(table.sequences)
    }

    /// Pins the sealed blocks of a sequence; `None` if the engine does not serve `pin`.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Lost`].
    pub async fn pin(&self, sequence: &str) -> Result<Option<Pin>> {
        let Some(member) = self.view.server(Verb::Pin) else { return Ok(None) };
        let call = ToEngine::Pin(PinRequest { sequence: sequence.into() });
        let timeout = self.view.shared.timeout;
        let guard = move |member: Arc<Member>, pinned: Pinned| Pin { member, pinned: Some(pinned), timeout, runtime: Handle::current() };
        granted(Arc::clone(member), timeout, call, "pin", guard).await.map(Some)
    }

    /// Resumes the engine and returns how long it was paused. Waits at most one minute longer than
    /// the timeout of a call. The resume call is repeated in the background until it is answered.
    ///
    /// # Errors
    /// [`Error::Lost`]. [`Error::PauseEnded`] if the engine went on before it was told to: what was
    /// read since may be of several steps and must not be used.
    pub async fn resume(mut self) -> Result<Duration> {
        // Runs in a task of its own: dropping this future does not stop the resume.
        let told = self.go_on();
        let since = self.since;
        let limit = self.view.shared.timeout + GRACE;
        match tokio::time::timeout(limit, told).await {
            Ok(Ok(Ok((Resumed { held: true }, at)))) => Ok(at.duration_since(since)),
            Ok(Ok(Ok((Resumed { held: false }, _)))) => Err(self.ended()),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(gone)) => Err(Error::Internal(format!("the task that resumes: {gone}"))),
            Err(_) => Err(self.member.late("resume", limit)),
        }
    }

    /// Resumes the engine in a task of its own, which returns the answer and its time.
    fn go_on(&mut self) -> pfr_service::task::Task<Result<(Resumed, Instant)>> {
        let (member, still, timeout) = (Arc::clone(&self.member), self.still.take(), self.view.shared.timeout);
        let call = ToEngine::Resume(ResumeRequest { pause: self.name.clone() });
        pfr_service::task::spawn_on(&self.runtime, async move {
            let answer = member.insist(timeout, call).await;
            let told = answer.and_then(|answer| member.read::<Resumed>("resume", answer));
            let at = Instant::now();
            drop(still);
            if let Err(error) = &told {
                tracing::error!(engine = member.engine, %error, "engine resume failed");
            }
            told.map(|resumed| (resumed, at))
        })
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.still.is_some() {
            drop(self.go_on());
        }
    }
}

/// Makes a call that grants something, and wraps the grant in its guard even if the caller was
/// cancelled. The drop of the guard gives a late grant back.
pub(super) async fn granted<T, G>(
    member: Arc<Member>,
    timeout: Duration,
    call: ToEngine,
    name: &'static str,
    guard: impl Fn(Arc<Member>, T) -> G + Send + 'static,
) -> Result<G>
where
    T: serde::de::DeserializeOwned + Send + 'static,
    G: Send + 'static,
{
    let (tell, told) = oneshot::channel();
    let calling = Arc::clone(&member);
    pfr_service::task::spawn(async move {
        let answer = calling.call(call).await;
        let read = answer.and_then(|answer| calling.read::<T>(name, answer));
        // Without a receiver, `send` returns the guard as its error, which is dropped here.
        drop(tell.send(read.map(|granted| guard(Arc::clone(&calling), granted))));
    });
    match tokio::time::timeout(timeout, told).await {
        Ok(Ok(granted)) => granted,
        Ok(Err(_)) => Err(member.lost(format!("its {name} did not return"))),
        Err(_) => Err(member.late(name, timeout)),
    }
}

/// Sealed blocks of a sequence stay pinned until this is dropped.
#[derive(Debug)]
pub struct Pin {
    member: Arc<Member>,
    pinned: Option<Pinned>,
    timeout: Duration,
    runtime: Handle,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Some(pinned) = self.pinned.take() else { return };
        let (member, timeout) = (Arc::clone(&self.member), self.timeout);
        pfr_service::task::spawn_on(&self.runtime, async move {
            if let Err(error) = member.insist(timeout, ToEngine::Unpin(pinned)).await {
                tracing::warn!(engine = member.engine, pin = pinned.pin, %error, "cannot unpin blocks of an engine");
            }
        });
    }
}
