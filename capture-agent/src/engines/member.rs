//! A member of an engine: one connection, or one attachment in this process.

use super::Link;
use super::layout::Group;
use crate::error::{Error, Result};
use pfr_schema::engine::{Register, ToEngine, Verb};
use pfr_schema::{ErrorCode, json};
use pfr_service::Backoff;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Pauses between two attempts of a call that must be answered.
const INSIST: Backoff = Backoff::new(Duration::from_millis(40), Duration::from_secs(5));

#[derive(Debug)]
pub(super) struct Member {
    pub engine: String,
    pub name: String,
    pub rank: u32,
    pub verbs: BTreeSet<Verb>,
    /// As registered.
    pub parallel: Vec<String>,
    pub groups: Vec<Group>,
    pub mapped: u64,
    link: Arc<dyn Link>,
    gone: watch::Sender<bool>,
}

impl Member {
    pub fn new(register: &Register, groups: Vec<Group>, mapped: u64, link: Arc<dyn Link>) -> Self {
        Self {
            engine: register.engine.clone(),
            name: register.member.clone(),
            rank: register.rank,
            verbs: register.verbs.iter().copied().collect(),
            parallel: register.parallel.clone(),
            groups,
            mapped,
            link,
            gone: watch::Sender::new(false),
        }
    }

    /// Ends every call that waits.
    pub fn end(&self) {
        self.gone.send_replace(true);
    }

    pub fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Makes a call and waits for the answer without a timeout, or until the member is gone.
    pub async fn call(&self, call: ToEngine) -> Result<Value> {
        let name = call.name();
        let mut gone = self.gone.subscribe();
        tokio::select! {
            biased;
            _ = gone.wait_for(|gone| *gone) => Err(self.lost(format!("member {:?} left before it answered {name}", self.name))),
            answer = self.link.call(call) => answer.map_err(|failure| match failure.code {
                ErrorCode::EngineLost => self.lost(failure.detail),
                _ => Error::Refused { engine: self.engine.clone(), call: name, failure },
            }),
        }
    }

    /// Makes a call that must be answered in time.
    pub async fn call_within<T: DeserializeOwned>(&self, timeout: Duration, call: ToEngine) -> Result<T> {
        let name = call.name();
        match tokio::time::timeout(timeout, self.call(call)).await {
            Ok(answer) => self.read(name, answer?),
            Err(_) => Err(self.late(name, timeout)),
        }
    }

    pub fn read<T: DeserializeOwned>(&self, call: &'static str, answer: Value) -> Result<T> {
        json::from_value(answer).map_err(|reason| self.broke(format!("its answer to {call} makes no sense: {reason}")))
    }

    pub fn lost(&self, reason: String) -> Error {
        Error::Lost { engine: self.engine.clone(), reason }
    }

    pub fn late(&self, call: &'static str, timeout: Duration) -> Error {
        self.lost(format!("member {:?} did not answer {call} within {} s", self.name, timeout.as_secs_f64()))
    }

    pub fn broke(&self, reason: String) -> Error {
        Error::Protocol { engine: self.engine.clone(), reason }
    }

    /// Repeats a call until it succeeds, because a grant must be given back. Stops when the member
    /// is gone, which ends all grants. Stops, too, when the member says that the grant does not
    /// exist: an earlier call may have succeeded with a late answer.
    pub async fn insist(&self, timeout: Duration, call: ToEngine) -> Result<Value> {
        let mut failures = 0_u32;
        loop {
            match self.call_within::<Value>(timeout, call.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) if self.is_gone() || is_given_back(&call, &error) => return Err(error),
                Err(error) => {
                    failures = failures.saturating_add(1);
                    tracing::warn!(engine = self.engine, member = self.name, call = call.name(), failures, %error, "engine call failed, retrying");
                }
            }
            tokio::time::sleep(INSIST.wait(failures)).await;
        }
    }
}

fn is_given_back(call: &ToEngine, error: &Error) -> bool {
    let unknown = |code| matches!(code, ErrorCode::InvalidRequest | ErrorCode::SequenceUnknown);
    !matches!(call, ToEngine::Resume(_)) && matches!(error, Error::Refused { failure, .. } if unknown(failure.code))
}
