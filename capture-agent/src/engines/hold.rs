//! The guard for blocks that an engine holds for a capture while it runs.

use super::member::Member;
use super::pause::{GRACE, granted};
use super::view::View;
use crate::error::{Error, Result};
use pfr_schema::engine::{HoldName, HoldRequest, Released, Sequence, SequenceInfo, SequenceList, ToEngine, Verb};
use pfr_service::task::Task;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// State of a sequence at rest. The engine holds its blocks until this is dropped or released, or
/// until its own limit is over, because this process may hang: then [`Hold::release`] fails.
#[derive(Debug)]
pub struct Hold {
    member: Arc<Member>,
    /// Told to the engine. Gone once it was told to release.
    name: Option<String>,
    timeout: Duration,
    runtime: Handle,
}

impl Hold {
    /// Takes a sequence, checked as [`super::Engine::check_sequence`] does. `save` is the ticket of
    /// the save that it is for.
    pub(super) async fn take(view: &View, sequence: &str, save: Option<&str>) -> Result<(Sequence, Self)> {
        let member = view.must_serve(Verb::Hold, "hold")?;
        let (timeout, name) = (view.shared.timeout, uuid::Uuid::now_v7().to_string());
        let call = ToEngine::Hold(HoldRequest { sequence: sequence.into(), hold: name.clone(), save: save.map(Into::into) });
        let runtime = Handle::current();
        let guard = move |member: Arc<Member>, sequence: Sequence| {
            (sequence, Self { member, name: Some(name.clone()), timeout, runtime: runtime.clone() })
        };
        let (sequence, hold) = granted(Arc::clone(member), timeout, call, "hold", guard).await?;
        view.check_sequence(&sequence)?;
        Ok((sequence, hold))
    }

    /// Lets the engine reuse the blocks. Waits at most one minute longer than the timeout of a
    /// call.
    ///
    /// # Errors
    /// [`Error::Lost`]. [`Error::HoldEnded`] if the engine reused the blocks before: what was read
    /// since must not be used.
    pub async fn release(mut self) -> Result<()> {
        let lost = || Error::Internal("a hold that was released before".into());
        // Runs in a task of its own: dropping this future does not stop it.
        let told = self.let_go().ok_or_else(lost)?;
        let limit = self.timeout + GRACE;
        match tokio::time::timeout(limit, told).await {
            Ok(Ok(Ok(Released { held: true }))) => Ok(()),
            Ok(Ok(Ok(Released { held: false }))) => Err(Error::HoldEnded { engine: self.member.engine.clone() }),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(gone)) => Err(Error::Internal(format!("the task that releases: {gone}"))),
            Err(_) => Err(self.member.late("release", limit)),
        }
    }

    /// Releases the blocks in a task of its own, which returns the answer. `None` if it was done.
    fn let_go(&mut self) -> Option<Task<Result<Released>>> {
        let hold = self.name.take()?;
        let (member, timeout) = (Arc::clone(&self.member), self.timeout);
        Some(pfr_service::task::spawn_on(&self.runtime, async move {
            let answer = member.insist(timeout, ToEngine::Release(HoldName { hold })).await;
            if let Err(error) = &answer {
                tracing::warn!(engine = member.engine, %error, "cannot release blocks of an engine");
            }
            member.read("release", answer?)
        }))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        drop(self.let_go());
    }
}

/// The sequences that an engine can hold now.
pub(super) async fn list(view: &View) -> Result<Vec<SequenceInfo>> {
    let member = view.must_serve(Verb::Hold, "hold")?;
    let list: SequenceList = member.call_within(view.shared.timeout, ToEngine::Sequences {}).await?;
    Ok(list.sequences)
}
