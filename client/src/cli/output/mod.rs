//! The only place that writes to stdout. A pipe whose reader is gone ends a command as a success.

pub mod bar;
pub mod graph;
pub mod human;
pub mod paint;
pub mod table;

use super::failure::Failure;
use paint::Paint;
use serde::Serialize;
use std::io::{self, BufWriter, IsTerminal as _, Write};
use table::Table;

/// Stdout, and what is known about its reader.
pub struct Out {
    writer: BufWriter<Box<dyn Write + Send>>,
    /// Colours, or none.
    pub paint: Paint,
    /// Columns of the terminal that are left to the right of the indentation; none in a pipe.
    pub width: Option<usize>,
    indent: usize,
}

impl Out {
    /// Stdout of this process.
    pub fn stdout() -> Self {
        let terminal = io::stdout().is_terminal();
        let width = terminal.then(|| terminal_width(io::stdout())).flatten();
        Self { writer: BufWriter::new(Box::new(io::stdout())), paint: Paint::for_stream(terminal), width, indent: 0 }
    }

    /// Stderr of this process, for narration when stdout carries JSON.
    pub fn stderr() -> Self {
        let width = stderr_width();
        Self { writer: BufWriter::new(Box::new(io::stderr())), paint: Paint::for_stream(width.is_some()), width, indent: 0 }
    }

    /// One line.
    pub fn line(&mut self, text: impl AsRef<str>) -> Result<(), Failure> {
        let text = text.as_ref();
        if !text.is_empty() {
            self.write(" ".repeat(self.indent).as_bytes())?;
        }
        self.write(text.as_bytes())?;
        self.write(b"\n")
    }

    /// Runs `lines` with everything it writes moved to the right.
    pub fn indented<T>(&mut self, columns: usize, lines: impl FnOnce(&mut Self) -> T) -> T {
        let width = self.width;
        self.indent += columns;
        self.width = width.map(|w| w.saturating_sub(columns));
        let result = lines(self);
        self.indent -= columns;
        self.width = width;
        result
    }

    /// One JSON document: indented for a person, on one line for a program.
    pub fn json<T: Serialize>(&mut self, value: &T) -> Result<(), Failure> {
        let document = pfr_client::json::document(value);
        let text = document.and_then(|document| match self.width {
            Some(_) => serde_json::to_string_pretty(&document),
            None => serde_json::to_string(&document),
        });
        self.line(text.map_err(|e| Failure::bug(format!("cannot write JSON: {e}")))?)
    }

    /// A line of less importance, dimmed.
    pub fn note(&mut self, text: &str) -> Result<(), Failure> {
        self.line(self.paint.dim(text))
    }

    /// A table, fitted to the terminal.
    pub fn table(&mut self, table: &Table) -> Result<(), Failure> {
        for line in table.render(&self.paint, self.width) {
            self.line(line)?;
        }
        Ok(())
    }

    /// Label and value pairs, the labels aligned. Empty values are left out.
    pub fn pairs(&mut self, pairs: &[(&str, String)]) -> Result<(), Failure> {
        let shown = || pairs.iter().filter(|(_, value)| !value.is_empty());
        let labels = shown().map(|(label, _)| human::columns(label)).max().unwrap_or(0);
        for (label, value) in shown() {
            self.line(format!("{}  {value}", self.paint.dim(&human::pad(label, labels))))?;
        }
        Ok(())
    }

    /// Bytes as they are.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.writer.write_all(bytes).map_err(|e| stdout_failed(&e))
    }

    /// Makes everything written so far visible.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.writer.flush().map_err(|e| stdout_failed(&e))
    }
}

fn stdout_failed(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Failure::BrokenPipe;
    }
    Failure::io("cannot write to stdout", error)
}

/// Columns of the terminal that stderr is; none if it is something else.
pub fn stderr_width() -> Option<usize> {
    io::stderr().is_terminal().then(|| terminal_width(io::stderr())).flatten()
}

fn terminal_width(stream: impl std::os::fd::AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    // A terminal that does not know its size says 0.
    Some(if size.ws_col == 0 { 80 } else { usize::from(size.ws_col) })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_ends_the_command_as_a_success() {
        let mut out = Out { writer: BufWriter::new(Box::new(Closed)), paint: Paint::plain(), width: None, indent: 0 };
        out.line("text").unwrap();
        assert_eq!(out.flush().unwrap_err().exit(), 0);
    }
}
