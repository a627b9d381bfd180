//! What the demo says while it works: short headed steps, the command a user would have typed, the result, the time.

use crate::cli::failure::Failure;
use crate::cli::output::Out;
use crate::cli::output::human::{columns, duration};
use serde::Serialize;
use std::time::Instant;

const INDENT: &str = "    ";

/// A step that is over.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    title: String,
    commands: Vec<String>,
    results: Vec<String>,
    seconds: f64,
}

/// Tells the story, and remembers it for `--json`.
pub struct Narrator {
    out: Out,
    told: Vec<Told>,
    step_start: Instant,
    command_start: Instant,
    pending: Option<String>,
}

impl Narrator {
    /// Speaks to `out`.
    pub fn new(out: Out) -> Self {
        Self { out, told: Vec::new(), step_start: Instant::now(), command_start: Instant::now(), pending: None }
    }

    /// Where tables and graphs go.
    pub fn out(&mut self) -> &mut Out {
        &mut self.out
    }

    /// A line outside of the steps.
    pub fn say(&mut self, text: &str) -> Result<(), Failure> {
        self.out.line(text)?;
        self.out.flush()
    }

    /// Starts a step.
    pub fn step(&mut self, title: &str) -> Result<(), Failure> {
        self.finish();
        self.step_start = Instant::now();
        self.told.push(Told { title: title.to_owned(), commands: vec![], results: vec![], seconds: 0.0 });
        let number = format!("{:>2}", self.told.len());
        self.say(&format!("\n{}  {}", self.out.paint.dim(&number), self.out.paint.bold(title)))
    }

    /// The command that a user would have typed.
    pub fn command(&mut self, command: &str) -> Result<(), Failure> {
        self.command_start = Instant::now();
        self.pending = Some(command.to_owned());
        if let Some(step) = self.told.last_mut() {
            step.commands.push(command.to_owned());
        }
        self.say(&format!("{INDENT}{}", self.out.paint.dim(&format!("$ {command}"))))
    }

    /// What came of the last command, with the time it took at the right.
    pub fn result(&mut self, text: &str) -> Result<(), Failure> {
        let time = duration(self.command_start.elapsed());
        self.remember(text);
        let room = self.out.width.unwrap_or(100).min(100);
        let used = INDENT.len() + columns(text) + columns(&time);
        let line = match room.checked_sub(used).filter(|gap| *gap >= 2) {
            Some(gap) => format!("{INDENT}{text}{}{}", " ".repeat(gap), self.out.paint.dim(&time)),
            None => format!("{INDENT}{text}  {}", self.out.paint.dim(&time)),
        };
        self.say(&line)
    }

    /// Another thing to see about the last command.
    pub fn also(&mut self, text: &str) -> Result<(), Failure> {
        self.remember(text);
        self.say(&format!("{INDENT}{text}"))
    }

    /// Everything told, once the last step is over.
    pub fn told(&mut self) -> &[Told] {
        self.finish();
        &self.told
    }

    /// The title of the step that runs.
    pub fn current(&self) -> Option<&str> {
        self.told.last().map(|step| step.title.as_str())
    }

    fn remember(&mut self, text: &str) {
        if let Some(step) = self.told.last_mut() {
            step.results.push(text.to_owned());
        }
    }

    fn finish(&mut self) {
        if let Some(step) = self.told.last_mut()
            && step.seconds == 0.0
        {
            step.seconds = self.step_start.elapsed().as_secs_f64();
        }
    }
}
