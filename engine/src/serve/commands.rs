//! Commands from standard input.

use super::Server;
use super::lines::{Command, Line, Prompt, code};
use super::sequences::Job;
use crate::cache::SeqId;
use crate::error::EngineError;
use pfr_schema::ErrorCode;
use std::time::{Duration, Instant};

impl Server {
    pub(super) fn command(&mut self, command: Command) {
        // These change memory, which must not change during a pause.
        let changes = matches!(command, Command::Open(_) | Command::Append { .. } | Command::Fork(_) | Command::Free(_));
        if changes && self.pause.is_on() {
            self.held.push_back(command);
            return;
        }
        match command {
            Command::Open(prompt) => self.open(prompt),
            Command::Generate { sequence, count, delay_ms } => self.with("generate", &sequence, |server, seq| {
                server.generate(seq, count, Duration::from_millis(delay_ms));
                Ok(())
            }),
            Command::Append { sequence, prompt } => self.with("append", &sequence, |server, seq| {
                let more = server.prompt(prompt)?;
                server.end(seq);
                server.sequences.append(seq, more)?;
                server.say(Line::Appended { sequence: seq.to_string(), tokens: server.sequences.all[&seq].tokens.clone() });
                Ok(())
            }),
            Command::Stop(named) => self.with("stop", &named.sequence, |server, seq| {
                server.end(seq);
                Ok(())
            }),
            Command::Fork(named) => self.with("fork", &named.sequence, |server, seq| {
                let fork = server.sequences.fork(seq)?;
                server.opened(fork);
                Ok(())
            }),
            Command::Free(named) => self.with("free", &named.sequence, |server, seq| {
                server.end(seq);
                server.sequences.free(seq)?;
                server.say(Line::Freed { sequence: seq.to_string() });
                Ok(())
            }),
            Command::Tokens(named) => self.with("tokens", &named.sequence, |server, seq| {
                let tokens = server.sequences.all[&seq].tokens.clone();
                let text = server.sequences.core.detokenize(&tokens);
                let boundary = server.sequences.boundary(seq);
                server.say(Line::Tokens { sequence: seq.to_string(), tokens, boundary, text });
                Ok(())
            }),
            Command::Sequences {} => {
                let running = self.sequences.all.iter().filter(|(_, sequence)| !sequence.waiting);
                self.say(Line::Sequences(running.map(|(seq, _)| seq.to_string()).collect()));
            }
            Command::Memory {} => {
                let blocks = self.sequences.core.blocks();
                let used = blocks.used();
                let free = used.iter().map(|used| (used.group.clone(), used.free)).collect();
                let used = used.into_iter().map(|used| (used.group, used.blocks)).collect();
                self.say(Line::Memory { digest: blocks.digest().to_string(), used, free });
            }
            Command::Poke { group, block, byte } => {
                if self.sequences.core.blocks_mut().poke(&group, block, byte) {
                    self.say(Line::Poked {});
                } else {
                    self.error("poke", ErrorCode::InvalidRequest, format!("no byte {byte} in block {block} of group {group:?}"));
                }
            }
            Command::Quit {} => self.quit = true,
        }
    }

    fn open(&mut self, prompt: Prompt) {
        let (salt, adapter) = (self.options.salt.clone(), self.options.adapter.clone());
        match self.prompt(prompt).and_then(|tokens| self.sequences.open(tokens, salt, adapter)) {
            Ok(seq) => self.opened(seq),
            Err(error @ EngineError::EmptySequence(_)) => self.error("open", ErrorCode::InvalidRequest, error.to_string()),
            Err(error) => self.error("open", code(&error), error.to_string()),
        }
    }

    fn prompt(&self, prompt: Prompt) -> Result<Vec<u32>, EngineError> {
        match (prompt.text, prompt.tokens) {
            (Some(text), None) => self.sequences.core.tokenize(&text),
            (None, Some(tokens)) => Ok(tokens),
            _ => Err(EngineError::Prompt),
        }
    }

    pub(super) fn opened(&self, seq: SeqId) {
        self.say(Line::Opened { sequence: seq.to_string(), tokens: self.sequences.all[&seq].tokens.clone() });
    }

    fn generate(&mut self, seq: SeqId, count: u64, delay: Duration) {
        self.end(seq);
        if let Some(sequence) = self.sequences.all.get_mut(&seq) {
            sequence.job = Some(Job { left: count, done: 0, delay, due: Instant::now() });
        }
        if count == 0 {
            self.end(seq);
        }
    }

    /// Applies a function to a running sequence.
    fn with(&mut self, command: &str, name: &str, work: impl FnOnce(&mut Self, SeqId) -> Result<(), EngineError>) {
        let Some(seq) = self.sequences.find(name).filter(|seq| !self.sequences.all[seq].waiting) else {
            return self.error(command, ErrorCode::SequenceUnknown, format!("no sequence {name:?}"));
        };
        if let Err(error) = work(self, seq) {
            self.error(command, code(&error), error.to_string());
        }
    }
}
