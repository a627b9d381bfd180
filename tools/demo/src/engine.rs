//! An engine as a child process: commands go in, events come out, one line of JSON each.

use crate::processes::Running;
use pfr_client::cli::Failure;
use pfr_schema::ErrorCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::time::{Instant, timeout};

/// How long a running engine may be silent.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An event of an engine.
#[derive(Debug)]
pub enum Event {
    /// A step was done.
    Token(Step),
    /// Generation is over.
    Generated,
    /// It has paused.
    Paused,
    /// Anything else, by name.
    Other(String, Value),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Step {
    /// The token that comes next.
    pub token: u32,
    /// The same as text.
    pub text: String,
    /// Digest of all logits of the step.
    pub logits: String,
    /// Tokens whose state is in memory.
    pub boundary: u64,
}

#[derive(Deserialize)]
struct Opened {
    sequence: String,
    tokens: Vec<u32>,
}

/// A running engine.
pub struct Engine {
    running: Running,
    name: String,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Engine {
    /// Starts `pf-kv serve` in `root`; it is ready after [`Self::attached`].
    pub fn start(program: &Path, root: &Path, name: &str, args: &[&str]) -> Result<Self, Failure> {
        let mut running = Running::start(program, root, name, args, Stdio::piped())?;
        let child = running.child();
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::bug(format!("{name} has no pipes")));
        };
        Ok(Self { running, name: name.to_owned(), input, output: BufReader::new(output).lines() })
    }

    /// Waits until its agent has accepted it. `fetching` is set if the model has to be fetched
    /// before.
    pub async fn attached(&mut self, fetching: &AtomicBool) -> Result<(), Failure> {
        loop {
            match self.next().await? {
                Event::Other(name, _) if name == "fetching" => fetching.store(true, Ordering::Relaxed),
                Event::Other(name, _) if name == "ready" => fetching.store(false, Ordering::Relaxed),
                Event::Other(name, _) if name == "attached" => return Ok(()),
                Event::Other(name, why) if name == "refused" => {
                    return Err(Failure::bug(format!("the agent refused {}: {why}", self.name)));
                }
                _ => {}
            }
        }
    }

    /// Computes a prompt. Returns the new sequence and the first token after the prompt.
    pub async fn open(&mut self, prompt: &str) -> Result<(String, u32), Failure> {
        let Opened { sequence, tokens } = self.ask(&json!({"open": {"text": prompt}}), "opened").await?;
        Ok((sequence, tokens.last().copied().unwrap_or_default()))
    }

    /// Appends text. Returns the first token after it.
    pub async fn append(&mut self, sequence: &str, text: &str) -> Result<u32, Failure> {
        let appended: Opened = self.ask(&json!({"append": {"sequence": sequence, "text": text}}), "appended").await?;
        Ok(appended.tokens.last().copied().unwrap_or_default())
    }

    /// The whole text of a sequence.
    pub async fn text(&mut self, sequence: &str) -> Result<String, Failure> {
        #[derive(Deserialize)]
        struct Tokens {
            text: String,
        }
        Ok(self.ask::<Tokens>(&json!({"tokens": {"sequence": sequence}}), "tokens").await?.text)
    }

    /// Computes the first `count` tokens of a sequence again, and discards them. Returns how long
    /// that took.
    pub async fn recompute(&mut self, sequence: &str, count: u64) -> Result<Duration, Failure> {
        let mut all: Opened = self.ask(&json!({"tokens": {"sequence": sequence}}), "tokens").await?;
        all.tokens.truncate(usize::try_from(count).unwrap_or(usize::MAX));
        let begin = Instant::now();
        let again: Opened = self.ask(&json!({"open": {"tokens": all.tokens}}), "opened").await?;
        let took = begin.elapsed();
        let _: Value = self.ask(&json!({"free": {"sequence": again.sequence}}), "freed").await?;
        Ok(took)
    }

    /// Names of all sequences.
    pub async fn sequences(&mut self) -> Result<Vec<String>, Failure> {
        self.ask(&json!({"sequences": {}}), "sequences").await
    }

    /// Starts to generate; [`Self::event`] tells of it.
    pub async fn generate(&mut self, sequence: &str, count: u64, delay: Duration) -> Result<(), Failure> {
        self.say(&json!({"generate": {"sequence": sequence, "count": count, "delay_ms": delay.as_millis() as u64}})).await
    }

    /// Ends generation; [`Event::Generated`] tells of it.
    pub async fn hold(&mut self, sequence: &str) -> Result<(), Failure> {
        self.say(&json!({"stop": {"sequence": sequence}})).await
    }

    /// The next event.
    pub async fn event(&mut self) -> Result<Event, Failure> {
        let silent = |_| self.running.failure(ErrorCode::Internal, &format!("said nothing for {TIMEOUT:?}"));
        timeout(TIMEOUT, read(&mut self.output, &self.name)).await.map_err(silent)??.map_or_else(|| Err(self.gone()), Ok)
    }

    /// Ends the engine, and waits for its end.
    pub async fn stop(mut self) -> Result<(), Failure> {
        self.say(&json!({"quit": {}})).await?;
        self.running.ended().await
    }

    async fn say(&mut self, command: &Value) -> Result<(), Failure> {
        let line = format!("{command}\n");
        self.input.write_all(line.as_bytes()).await.map_err(|_| self.gone())
    }

    async fn ask<T: DeserializeOwned>(&mut self, command: &Value, answer: &str) -> Result<T, Failure> {
        self.say(command).await?;
        loop {
            match self.event().await? {
                Event::Other(name, value) if name == answer => return parse(&self.name, value),
                _ => {}
            }
        }
    }

    async fn next(&mut self) -> Result<Event, Failure> {
        match read(&mut self.output, &self.name).await? {
            Some(event) => Ok(event),
            // Its exit code says whether the model could not be fetched.
            None => Err(self.running.ended().await.err().unwrap_or_else(|| self.gone())),
        }
    }

    fn gone(&self) -> Failure {
        self.running.failure(ErrorCode::Internal, "has ended")
    }
}

async fn read(lines: &mut Lines<BufReader<ChildStdout>>, name: &str) -> Result<Option<Event>, Failure> {
    let line = lines.next_line().await.map_err(|e| Failure::bug(format!("cannot read from {name}: {e}")))?;
    line.map(|line| event(name, &line)).transpose()
}

fn event(engine: &str, line: &str) -> Result<Event, Failure> {
    let parsed: Result<Map<String, Value>, _> = serde_json::from_str(line);
    let said = parsed.ok().and_then(|map| map.into_iter().next());
    let (name, value) = said.ok_or_else(|| Failure::bug(format!("{engine} says {line:?}")))?;
    Ok(match name.as_str() {
        "token" => Event::Token(parse(engine, value)?),
        "generated" => Event::Generated,
        "paused" => Event::Paused,
        "error" => return Err(Failure::bug(format!("{engine}: {value}"))),
        _ => Event::Other(name, value),
    })
}

fn parse<T: DeserializeOwned>(engine: &str, value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|e| Failure::bug(format!("{engine} says something else than was expected: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_events_and_errors_fail() {
        let token = r#"{"token":{"sequence":"seq-1","token":7,"text":" a","logits":"sha256:0","boundary":3}}"#;
        assert!(matches!(event("e", token).unwrap(), Event::Token(step) if step.token == 7 && step.boundary == 3));
        assert!(matches!(event("e", r#"{"paused":{}}"#).unwrap(), Event::Paused));
        assert!(matches!(event("e", r#"{"freed":{}}"#).unwrap(), Event::Other(name, _) if name == "freed"));
        for line in [r#"{"error":{"command":"open","code":"no_room","detail":"x"}}"#, "{}", "[]", "", r#"{"token":{}}"#] {
            assert_eq!(event("e", line).unwrap_err().exit(), 70, "{line}");
        }
    }
}
