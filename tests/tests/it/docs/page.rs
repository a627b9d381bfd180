//! A page of the documentation, and the commands in it.
//!
//! Commands are the lines that begin with `$ ` in blocks marked `console` or `sh`; lines that begin
//! with `> ` continue them. The lines after a command are its output. The words after the language
//! say how a block is run:
//!
//! | | |
//! |---|---|
//! | nothing | after the blocks before it on the page, in the same shell |
//! | `fresh` | in a new environment |
//! | `not-run: REASON` | not at all; [`REASONS`] lists all reasons |
//!
//! A block between `<!-- console` and `-->` is run like any other, and readers do not see it. It
//! makes what a page takes for granted.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why a block is not run. docs/testing.md says what stands in for such blocks.
pub const REASONS: [&str; 7] = [
    "builds the programs",
    "runs the checks themselves",
    "needs the network",
    "needs an engine",
    "needs systemd as process 1",
    "needs a container engine or a cluster",
    "takes minutes to hours",
];

/// How a block is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    Run,
    Fresh,
    /// One of [`REASONS`].
    NotRun(&'static str),
}

/// One command, and the output that is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub line: usize,
    pub command: String,
    pub shown: Vec<String>,
}

/// One fenced block of commands.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    pub line: usize,
    pub mark: Mark,
    /// Whether readers see it.
    pub seen: bool,
    pub steps: Vec<Step>,
}

/// A page.
pub struct Page {
    /// Relative to the repository.
    pub name: String,
    pub blocks: Vec<Block>,
    /// Text between backticks in sentences, with its line.
    pub spans: Vec<(usize, String)>,
}

/// What is wrong with a page, and where.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    pub line: usize,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.line, self.what)
    }
}

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

impl Page {
    pub fn read(name: &str) -> Self {
        let text = std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        Self::parse(name, &text).unwrap_or_else(|fault| panic!("{name}:{fault}"))
    }

    pub fn parse(name: &str, text: &str) -> Result<Self, Fault> {
        let mut page = Self { name: name.to_owned(), blocks: Vec::new(), spans: Vec::new() };
        let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
        while let Some((line, text)) = lines.next() {
            let Some((info, end)) = opening(text.trim_start()) else {
                page.spans.extend(spans(text).map(|span| (line, span.to_owned())));
                continue;
            };
            let indent = text.len() - text.trim_start().len();
            let mut content = Vec::new();
            loop {
                let (n, text) = lines.next().ok_or(Fault { line, what: "the block has no end".into() })?;
                let text = text.get(indent..).unwrap_or(text.trim_start());
                if text.starts_with(end) {
                    break;
                }
                content.push((n, text));
            }
            page.blocks.extend(block(line, info.trim(), end == "```", &content)?);
        }
        Ok(page)
    }

    /// Whether anything on it is run.
    pub fn is_run(&self) -> bool {
        self.is_run_by("")
    }

    /// Whether a command that is run contains `word`.
    pub fn is_run_by(&self, word: &str) -> bool {
        let run = self.blocks.iter().filter(|block| !matches!(block.mark, Mark::NotRun(_)));
        run.flat_map(|block| &block.steps).any(|step| step.command.contains(word))
    }
}

/// What a line says of the block that it opens, and what closes that block.
fn opening(text: &str) -> Option<(&str, &str)> {
    let seen = text.strip_prefix("```").map(|info| (info, "```"));
    seen.or_else(|| text.strip_prefix("<!-- ").filter(|info| info.starts_with("console")).map(|info| (info, "-->")))
}

fn block(line: usize, info: &str, seen: bool, content: &[(usize, &str)]) -> Result<Option<Block>, Fault> {
    let (language, word) = info.split_once(' ').map_or((info, ""), |(language, word)| (language, word.trim()));
    if !matches!(language, "console" | "sh") {
        let stray = |text: &str| text.starts_with("$ ") || (language.is_empty() && super::usage::is_command(text));
        return match content.iter().find(|(_, text)| stray(text)) {
            Some(&(line, text)) => Err(Fault { line, what: format!("{text:?} belongs in a block marked `console`") }),
            None => Ok(None),
        };
    }
    let mark = match word.split_once(':') {
        None if word.is_empty() => Mark::Run,
        None if word == "fresh" => Mark::Fresh,
        Some(("not-run", given)) => match REASONS.iter().find(|reason| **reason == given.trim()) {
            Some(reason) => Mark::NotRun(reason),
            None => return Err(Fault { line, what: format!("{:?} is no reason; {REASONS:?} are", given.trim()) }),
        },
        _ => return Err(Fault { line, what: format!("{word:?} is neither `fresh` nor `not-run: REASON`") }),
    };
    let mut steps: Vec<Step> = Vec::new();
    for &(line, text) in content.iter().filter(|(_, text)| !text.trim().is_empty()) {
        match (text.strip_prefix("$ "), steps.last_mut()) {
            (Some(command), _) => steps.push(Step { line, command: command.to_owned(), shown: Vec::new() }),
            (None, None) => return Err(Fault { line, what: format!("{text:?} is output of no command: commands begin with `$ `") }),
            (None, Some(step)) => match text.strip_prefix("> ").or((text == ">").then_some("")) {
                Some(more) if step.shown.is_empty() => step.command = format!("{}\n{more}", step.command),
                _ => step.shown.push(text.to_owned()),
            },
        }
    }
    if steps.is_empty() {
        return Err(Fault { line, what: "the block has no line that begins with `$ `".into() });
    }
    let two = steps.iter().find(|step| !matches!(mark, Mark::NotRun(_)) && step.command.contains(" ; "));
    if let Some(step) = two {
        return Err(Fault { line: step.line, what: "one command a line: the exit code of the first is lost".into() });
    }
    Ok(Some(Block { line, mark, seen, steps }))
}

/// What stands between single backticks.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Every Markdown file of the repository, sorted.
pub fn all() -> Vec<Page> {
    files(|name| name.ends_with(".md")).iter().map(|name| Page::read(name)).collect()
}

/// Files of the repository whose last component fits, relative to it, sorted.
pub fn files(fits: impl Fn(&str) -> bool) -> Vec<String> {
    let mut names = Vec::new();
    let mut stack = vec![PathBuf::new()];
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(root().join(&dir)).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let path = dir.join(&name);
            // Skip build outputs and hidden folders, and links, whose targets are found anyway.
            if name.starts_with('.') || name == "target" || name == "node_modules" {
                continue;
            }
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                stack.push(path);
            } else if kind.is_file() && fits(&name) {
                names.push(path.to_str().unwrap().to_owned());
            }
        }
    }
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Result<Block, Fault> {
        Page::parse("x.md", text).map(|page| page.blocks.into_iter().next().unwrap())
    }

    #[test]
    fn a_block_is_commands_with_their_output() {
        let block = one("Text.\n\n```console\n$ a b   # c\nout\n\nmore\n$ d <<E\n> one\n>\n> E\n```\n").unwrap();
        assert_eq!(block.mark, Mark::Run);
        let step = |line, command: &str, shown: &[&str]| Step {
            line,
            command: command.into(),
            shown: shown.iter().map(|s| (*s).to_owned()).collect(),
        };
        assert_eq!(block.steps, [step(4, "a b   # c", &["out", "more"]), step(8, "d <<E\none\n\nE", &[])]);
    }

    #[test]
    fn a_block_that_is_not_run_says_why() {
        assert_eq!(one("```console not-run: needs an engine\n$ x\n```").unwrap().mark, Mark::NotRun("needs an engine"));
        assert_eq!(one("```sh fresh\n$ x\n```").unwrap().mark, Mark::Fresh);
        for info in ["not-run", "not-run:", "not-run:  ", "not-run: on a whim", "ignore", "no-run: needs an engine"] {
            let fault = one(&format!("```console {info}\n$ x\n```")).unwrap_err();
            assert_eq!(fault.line, 1, "{info}: {fault}");
        }
    }

    #[test]
    fn commands_that_nothing_would_run_are_faults() {
        for command in ["pf ls", "cargo run", "PF_STORE=/x pf ls", "./check"] {
            assert_eq!(one(&format!("```\n{command}\n```")).unwrap_err().line, 2, "{command}");
        }
        assert_eq!(one("```text\nfine\n$ pf ls\n```").unwrap_err().line, 3);
        assert_eq!(one("```console\npf ls\n```").unwrap_err().line, 2);
        assert_eq!(one("```console\n$ x\n").unwrap_err().line, 1);
        assert_eq!(one("```console\n$ x ; y\n```").unwrap_err().line, 2);
    }

    #[test]
    fn blocks_that_readers_do_not_see_are_found() {
        let block = one("<!-- console fresh\n$ a\n-->\n").unwrap();
        assert_eq!((block.mark, block.seen, block.steps[0].command.as_str()), (Mark::Fresh, false, "a"));
        assert!(one("```console\n$ a\n```\n").unwrap().seen);
        assert!(Page::parse("x.md", "<!-- a remark: `$ a` -->\n").unwrap().blocks.is_empty());
    }

    #[test]
    fn indented_blocks_and_spans_are_found() {
        let page = Page::parse("x.md", "* `pf ls` and `b`\n  ```console\n  $ pf ls\n  out\n  ```\n").unwrap();
        assert_eq!(page.blocks[0].steps[0].shown, ["out"]);
        assert_eq!(page.spans, [(1, "pf ls".to_owned()), (1, "b".to_owned())]);
    }
}
