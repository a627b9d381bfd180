//! Calls of the capture agent.

use super::lines::{Line, code, sampling};
use super::sequences::{Sequence, top};
use super::{Link, Server};
use crate::attach::{self, Event};
use crate::cache::SeqId;
use crate::error::EngineError;
use pfr_schema::ErrorCode;
use pfr_schema::engine::{
    Allocate, Allocated, CallError, Message, Oracle, OracleRequest, Pinned, Resumed, Sequence as Row, Table, ToAgent, ToEngine, Verb,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::net::Shutdown;
use std::time::Instant;

type Answer = Result<Value, CallError>;

fn failure(code: ErrorCode, detail: impl Into<String>) -> CallError {
    CallError { code, detail: detail.into() }
}

fn failed(error: &EngineError) -> CallError {
    failure(code(error), error.to_string())
}

fn value(answer: &impl Serialize) -> Answer {
    serde_json::to_value(answer).map_err(|error| failure(ErrorCode::Internal, error.to_string()))
}

/// The verb that a call belongs to.
fn verb(call: &ToEngine) -> Verb {
    match call {
        ToEngine::Pause(_) | ToEngine::Resume(_) => Verb::Pause,
        ToEngine::Table(_) => Verb::Table,
        ToEngine::Pin(_) | ToEngine::Unpin(_) => Verb::Pin,
        ToEngine::Oracle(_) => Verb::Oracle,
        ToEngine::Allocate(_) | ToEngine::Activate(_) | ToEngine::Discard(_) => Verb::Allocate,
        ToEngine::Staged(_) => Verb::Request,
        ToEngine::Sequences {} | ToEngine::Hold(_) | ToEngine::Release(_) => Verb::Hold,
    }
}

impl Server {
    pub(super) fn agent(&mut self, event: Event) {
        match event {
            Event::Attached { connection, registered, stream } => {
                self.link = Some(Link { connection, stream });
                self.say(Line::Attached { agent: registered.agent, fingerprint: registered.fingerprint.to_string() });
            }
            Event::Refused(CallError { code, detail }) => self.say(Line::Refused { code, detail }),
            Event::Call { connection, id, call } if self.link.as_ref().is_some_and(|link| link.connection == connection) => {
                if let Some(answer) = self.call(id, call) {
                    self.answer(id, answer);
                }
            }
            Event::Call { .. } => {}
            Event::Detached { connection, reason } => {
                if self.link.take_if(|link| link.connection == connection).is_some() {
                    self.abandoned();
                    self.say(Line::Detached { reason });
                }
            }
        }
    }

    /// The agent has gone: releases everything that it held, so that the engine can go on.
    fn abandoned(&mut self) {
        self.logits_calls.clear();
        for pin in std::mem::take(&mut self.pins).into_values() {
            self.sequences.core.blocks_mut().unpin(pin);
        }
        let unfinished: Vec<SeqId> = self.sequences.all.iter().filter(|(_, s)| s.waiting).map(|(seq, _)| *seq).collect();
        for seq in unfinished {
            // The sequence is in the table, so this cannot fail.
            let _ = self.sequences.free(seq);
        }
        if self.pause.stop() {
            self.resumed();
        }
    }

    /// The agent may hang: a pause ends by itself. A later resume says that it did.
    pub(super) fn go_on_if_due(&mut self) {
        if self.pause.expire(Instant::now()) {
            self.resumed();
        }
    }

    fn answer(&mut self, id: u64, answer: Answer) {
        let message: Message<ToAgent> = match answer {
            Ok(ok) => Message::Ok { id, ok },
            Err(error) => Message::Error { id, error },
        };
        let Some(link) = &self.link else { return };
        if attach::send(&link.stream, &message, &[]).is_err() {
            // The reading thread sees the end and reports it; a broken stream cannot be shut down
            // twice.
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }

    /// The answer to a call; `None` if it comes later.
    fn call(&mut self, id: u64, call: ToEngine) -> Option<Answer> {
        let verb = verb(&call);
        if !self.options.verbs.contains(&verb) {
            return Some(Err(failure(ErrorCode::EngineBusy, format!("{verb:?} is not served here"))));
        }
        if !self.pause.is_on() && matches!(call, ToEngine::Table(_) | ToEngine::Pin(_)) {
            return Some(Err(failure(ErrorCode::InvalidRequest, "only while paused")));
        }
        let none = Ok(json!({}));
        Some(match call {
            ToEngine::Pause(request) => {
                if self.pause.begin(request, Instant::now()) {
                    self.sequences.paused();
                    self.say(Line::Paused {});
                }
                none
            }
            ToEngine::Resume(request) => {
                let was_on = self.pause.is_on();
                let held = self.pause.end(&request.pause);
                // Answer first, since the deferred commands may take long.
                self.answer(id, value(&Resumed { held }));
                if was_on && !self.pause.is_on() {
                    self.resumed();
                }
                return None;
            }
            ToEngine::Staged(_) => none,
            ToEngine::Sequences {} | ToEngine::Hold(_) | ToEngine::Release(_) => {
                Err(failure(ErrorCode::EngineBusy, "no blocks are held here"))
            }
            ToEngine::Table(request) => self.table(request.sequence.as_deref()),
            ToEngine::Pin(request) => self.pin(&request.sequence),
            ToEngine::Unpin(Pinned { pin }) => match self.pins.remove(&pin) {
                Some(pin) => {
                    self.sequences.core.blocks_mut().unpin(pin);
                    none
                }
                None => Err(failure(ErrorCode::InvalidRequest, format!("no pin {pin}"))),
            },
            ToEngine::Oracle(request) => {
                self.logits_calls.push((id, request));
                return None;
            }
            ToEngine::Allocate(request) => self.allocate(*request),
            ToEngine::Activate(name) => self.waiting(&name.sequence).map(|seq| {
                if let Some(sequence) = self.sequences.all.get_mut(&seq) {
                    sequence.waiting = false;
                }
                self.opened(seq);
                json!({})
            }),
            ToEngine::Discard(name) => match self.waiting(&name.sequence) {
                Ok(seq) => self.sequences.free(seq).map(|()| json!({})).map_err(|error| failed(&error)),
                Err(failure) => Err(failure),
            },
        })
    }

    fn resumed(&mut self) {
        self.say(Line::Resumed {});
        for command in std::mem::take(&mut self.held) {
            self.command(command);
        }
    }

    fn running(&self, name: &str) -> Result<SeqId, CallError> {
        let seq = self.sequences.find(name).filter(|seq| !self.sequences.all[seq].waiting);
        seq.ok_or_else(|| failure(ErrorCode::SequenceUnknown, format!("no sequence {name:?}")))
    }

    fn waiting(&self, name: &str) -> Result<SeqId, CallError> {
        let seq = self.sequences.find(name).filter(|seq| self.sequences.all[seq].waiting);
        seq.ok_or_else(|| failure(ErrorCode::SequenceUnknown, format!("no allocated sequence {name:?}")))
    }

    fn table(&self, only: Option<&str>) -> Answer {
        let wanted: Vec<SeqId> = match only {
            Some(name) => vec![self.running(name)?],
            None => self.sequences.all.iter().filter(|(_, sequence)| !sequence.waiting).map(|(seq, _)| *seq).collect(),
        };
        let row = |seq: SeqId| -> Result<Row, CallError> {
            let sequence = &self.sequences.all[&seq];
            Ok(Row {
                id: seq.to_string(),
                tokens: sequence.tokens.clone(),
                boundary: self.sequences.boundary(seq),
                blocks: self.sequences.core.blocks().blocks(seq).map_err(|error| failed(&error))?,
                salt: sequence.salt.clone(),
                adapter: sequence.adapter.clone(),
                sampling: sampling(),
                unrecorded: Vec::new(),
            })
        };
        value(&Table { sequences: wanted.into_iter().map(row).collect::<Result<_, _>>()? })
    }

    fn pin(&mut self, name: &str) -> Answer {
        let seq = self.running(name)?;
        let held = self.sequences.core.blocks_mut().pin(seq).map_err(|error| failed(&error))?;
        let pin = self.next_pin;
        self.next_pin += 1;
        self.pins.insert(pin, held);
        value(&Pinned { pin })
    }

    fn allocate(&mut self, request: Allocate) -> Answer {
        let Allocate { tokens, boundary, salt, adapter, sampling: settings } = request;
        let refuse = |detail: String| Err(failure(ErrorCode::InvalidRequest, detail));
        if boundary == 0 || boundary >= tokens.len() as u64 {
            return refuse(format!("boundary {boundary} of {} tokens: 1 or more must be computed, and 1 or more not yet", tokens.len()));
        }
        if settings.iter().any(|(name, value)| sampling().get(name) != Some(value)) {
            return refuse(format!("this engine takes the best token, it cannot go on with {settings:?}"));
        }
        let sequence = Sequence::to_restore(tokens, salt, adapter);
        let seq = self.sequences.allocate(boundary, sequence).map_err(|error| failed(&error))?;
        let blocks = self.sequences.core.blocks().blocks(seq).map_err(|error| failed(&error))?;
        value(&Allocated { sequence: seq.to_string(), blocks })
    }

    /// Answers the oracle calls whose logits are known. During a pause no step runs, so calls about
    /// idle sequences wait for its end.
    pub(super) fn answer_oracles(&mut self) {
        for (id, request) in std::mem::take(&mut self.logits_calls) {
            match self.oracle(&request) {
                Some(answer) => self.answer(id, answer),
                None => self.logits_calls.push((id, request)),
            }
        }
    }

    fn oracle(&mut self, request: &OracleRequest) -> Option<Answer> {
        let empty = || Some(value(&Oracle { boundary: request.boundary, top: Vec::new() }));
        let Some(seq) = self.sequences.find(&request.sequence) else { return empty() };
        let (at, sequence) = (self.sequences.boundary(seq), &self.sequences.all[&seq]);
        let logits = match sequence.scores(request.boundary) {
            Some(logits) => logits,
            None if at > request.boundary => return empty(),
            // The step will come.
            None if self.pause.is_on() || sequence.job.is_some() => return None,
            None if at < request.boundary => return empty(),
            None => match self.sequences.foresee(seq) {
                Ok(logits) => logits,
                Err(error) => return Some(Err(failed(&error))),
            },
        };
        Some(value(&Oracle { boundary: request.boundary, top: top(&logits, request.top) }))
    }
}
