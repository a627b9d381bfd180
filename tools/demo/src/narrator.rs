//! The output of the demo: steps with a title, the command that a user would type, the result, the
//! time.

use crate::prose::Prose;
use pfr_client::cli::Failure;
use pfr_client::cli::output::Out;
use pfr_client::cli::output::human::{columns, duration, printable, wrap};
use pfr_client::cli::output::paint::Style;
use serde::Serialize;
use std::time::{Duration, Instant};

const INDENT: usize = 4;
/// Wider lines are harder to read, however wide the terminal is.
const WIDEST: usize = 100;
/// Room for the time at the right.
const TIME: usize = 10;

/// A finished step.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    title: String,
    commands: Vec<String>,
    results: Vec<String>,
    seconds: f64,
}

/// Prints the story, and keeps it for `--json`.
pub struct Narrator {
    out: Out,
    told: Vec<Told>,
    step_start: Instant,
    command_start: Instant,
    prose: Prose,
    /// Whether the last line is not ended.
    open: bool,
}

impl Drop for Narrator {
    fn drop(&mut self) {
        if self.open {
            // Output after an interruption starts on a new line.
            let _ = self.write("\n");
        }
    }
}

impl Narrator {
    /// Prints to `out`.
    pub fn new(out: Out) -> Self {
        let prose = Prose::new(WIDEST, INDENT, out.paint);
        Self { out, told: Vec::new(), step_start: Instant::now(), command_start: Instant::now(), prose, open: false }
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
        for (i, line) in wrap(title, self.room()).iter().enumerate() {
            let before = if i == 0 { format!("\n{}  ", self.out.paint.dim(&number)) } else { " ".repeat(INDENT) };
            self.say(&format!("{before}{}", self.out.paint.bold(line)))?;
        }
        Ok(())
    }

    /// The command that a user would have typed after `prompt`.
    pub fn command(&mut self, prompt: &str, command: &str) -> Result<(), Failure> {
        self.command_start = Instant::now();
        if let Some(step) = self.told.last_mut() {
            step.commands.push(command.to_owned());
        }
        let mut lines = wrap(&format!("{prompt} {command}"), self.room());
        let last = lines.len().saturating_sub(1);
        for (i, line) in lines.iter_mut().enumerate() {
            let (before, after) = (if i > 0 { "     " } else { "" }, if i < last { " \\" } else { "" });
            *line = self.out.paint.dim(&format!("{before}{line}{after}"));
        }
        self.lines(&lines)
    }

    /// The result of the last command, with its time at the right.
    pub fn result(&mut self, text: &str) -> Result<(), Failure> {
        self.result_after(text, self.command_start.elapsed().as_secs_f64())
    }

    /// Likewise, with the time that is given.
    pub fn result_after(&mut self, text: &str, seconds: f64) -> Result<(), Failure> {
        let time = duration(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        self.remember(text);
        let mut lines = wrap(text, self.room());
        if let Some(last) = lines.last_mut() {
            let gap = (self.room() + TIME).saturating_sub(columns(last) + columns(&time)).max(2);
            *last = format!("{last}{}{}", " ".repeat(gap), self.out.paint.dim(&time));
        }
        self.lines(&lines)
    }

    /// Another thing to see about the last command.
    pub fn also(&mut self, text: &str) -> Result<(), Failure> {
        self.remember(text);
        self.lines(&wrap(text, self.room()))
    }

    /// An expected error.
    pub fn refusal(&mut self, message: &str) -> Result<(), Failure> {
        self.remember(&format!("error: {message}"));
        let mut lines = wrap(&format!("error: {message}"), self.room());
        if let Some(first) = lines.first_mut() {
            *first = first.replacen("error:", &self.out.paint.red("error:"), 1);
        }
        self.lines(&lines)
    }

    /// Begins text that comes bit by bit, after a title.
    pub fn begin(&mut self, title: &str) -> Result<(), Failure> {
        self.command_start = Instant::now();
        self.prose = Prose::new(self.room(), INDENT, self.out.paint);
        let written = self.prose.title(title);
        self.open = true;
        self.write(&written)
    }

    /// Begins the words of a speaker.
    pub fn begin_of(&mut self, name: char) -> Result<(), Failure> {
        self.command_start = Instant::now();
        self.prose = Prose::new(self.room(), INDENT, self.out.paint);
        let written = self.prose.name(name);
        self.open = true;
        self.write(&written)
    }

    /// A bit of it.
    pub fn bit(&mut self, text: &str, style: Style) -> Result<(), Failure> {
        let written = self.prose.bit(&printable(text), style);
        self.write(&written)
    }

    /// A sign in the text.
    pub fn mark(&mut self, sign: &str, style: Style) {
        self.prose.mark(sign, style);
    }

    /// Ends the text where it might go on.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.prose.mark("…", Style::Dim);
        let written = self.prose.end();
        self.open = false;
        let told = self.prose.told().to_owned();
        self.remember(&told);
        self.write(&written)
    }

    /// A table or a drawing.
    pub fn show(&mut self, draw: impl FnOnce(&mut Out) -> Result<(), Failure>) -> Result<(), Failure> {
        self.out.indented(INDENT, draw)?;
        self.out.flush()
    }

    /// All steps, after the last one has ended.
    pub fn told(&mut self) -> &[Told] {
        self.finish();
        &self.told
    }

    /// The title of the step that runs.
    pub fn current(&self) -> Option<&str> {
        self.told.last().map(|step| step.title.as_str())
    }

    /// Whether the output is a terminal, so that a user watches it live.
    pub fn is_watched(&self) -> bool {
        self.out.width.is_some()
    }

    /// Columns for text, between the indentation and the time.
    fn room(&self) -> usize {
        self.out.width.unwrap_or(WIDEST).min(WIDEST).saturating_sub(INDENT + TIME).max(20)
    }

    fn write(&mut self, text: &str) -> Result<(), Failure> {
        self.out.write(text.as_bytes())?;
        self.out.flush()
    }

    fn lines(&mut self, lines: &[String]) -> Result<(), Failure> {
        self.show(|out| lines.iter().try_for_each(|line| out.line(line)))
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
