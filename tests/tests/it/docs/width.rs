//! Sentences are at most 100 columns wide: on pages, and in the comments of Rust, Python and shell.
//! Code, tables and fenced blocks may be wider, and so may one long word.

use super::page::{files, root};
use std::collections::BTreeSet;
use std::io::Read;

const WIDEST: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Language {
    Markdown,
    Rust,
    Python,
    Shell,
}

impl Language {
    /// By the end of the name; of a program without one, by its first line.
    fn of(name: &str) -> Option<Self> {
        let file = name.rsplit('/').next().unwrap_or(name);
        match file.rsplit_once('.') {
            Some((_, "md")) => Some(Self::Markdown),
            Some((_, "rs")) => Some(Self::Rust),
            Some((_, "py")) => Some(Self::Python),
            Some(_) => None,
            None => {
                let mut first = Vec::new();
                std::fs::File::open(root().join(name)).unwrap().take(64).read_to_end(&mut first).unwrap();
                let first = String::from_utf8_lossy(&first).lines().next().unwrap_or_default().to_owned();
                let python = if first.contains("python") { Self::Python } else { Self::Shell };
                first.starts_with("#!").then_some(python)
            }
        }
    }
}

/// Numbers and widths of the lines that are too wide.
fn too_wide(language: Language, text: &str) -> Vec<(usize, usize)> {
    let (mut fenced, mut string) = (false, None);
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let Some(said) = sentence(language, line, &mut string) else {
            fenced &= language == Language::Markdown;
            continue;
        };
        let hidden = language == Language::Markdown && (said.starts_with("<!-- console") || said == "-->");
        let fence = hidden || said.starts_with("```");
        fenced ^= fence;
        let columns = line.chars().count();
        if !fenced && !fence && !said.starts_with('|') && columns > WIDEST && words(said) > 1 {
            found.push((i + 1, columns));
        }
    }
    found
}

/// What a line says to its reader, without the signs in front; `None` for code. `string` says
/// whether the line before it ended in a string of Python between triple quotes, and whether that
/// one is a docstring.
fn sentence<'a>(language: Language, line: &'a str, string: &mut Option<bool>) -> Option<&'a str> {
    let text = line.trim_start();
    let said = match language {
        Language::Markdown => text,
        Language::Rust => text.strip_prefix("//")?.trim_start_matches(['/', '!']),
        Language::Shell => text.strip_prefix('#')?,
        Language::Python => {
            let documents = string.unwrap_or_else(|| text.starts_with("\"\"\""));
            let within = string.is_some();
            if text.matches("\"\"\"").count() % 2 == 1 {
                *string = if within { None } else { Some(documents) };
            }
            match text.strip_prefix('#') {
                Some(comment) if !within => comment,
                _ if documents => text,
                _ => return None,
            }
        }
    };
    let said = said.trim_start();
    Some(["* ", "- ", "> "].iter().find_map(|mark| said.strip_prefix(mark)).unwrap_or(said))
}

/// The parts of a line that could be on lines of their own. Text between backticks is one.
fn words(said: &str) -> usize {
    let mut quoted = false;
    let breaks = said.chars().filter(|&c| {
        quoted ^= c == '`';
        c == ' ' && !quoted
    });
    breaks.count() + 1
}

#[test]
fn no_sentence_is_wider_than_a_hundred_columns() {
    let (mut faults, mut seen) = (Vec::new(), BTreeSet::new());
    for name in files(|file| !file.contains('.') || [".md", ".rs", ".py"].iter().any(|end| file.ends_with(end))) {
        let Some(language) = Language::of(&name) else { continue };
        seen.insert(language);
        let text = std::fs::read_to_string(root().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        faults.extend(too_wide(language, &text).into_iter().map(|(line, columns)| format!("{name}:{line}: {columns} columns")));
    }
    assert_eq!(seen.len(), 4, "found only {seen:?}");
    assert!(faults.is_empty(), "wrap at {WIDEST} columns:\n{}", faults.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines that are too wide. `~` stands for a hundred columns of words, `LONG` for one word of
    /// 101.
    fn lines(language: Language, text: &str) -> Vec<usize> {
        let text = text.replace('~', &"ten words ".repeat(10)).replace("LONG", &"l".repeat(101));
        too_wide(language, &text).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn sentences_are_measured_and_code_is_not() {
        use Language::{Markdown, Python, Rust, Shell};
        let none = Vec::<usize>::new();
        assert_eq!(lines(Markdown, "~\n* ~.\nshort\n~."), [2, 4]);
        assert_eq!(lines(Markdown, "| ~ |\n```text\n~~\n```\n~~"), [5]);
        assert_eq!(lines(Markdown, "LONG\n* LONG\n`~LONG`,\n~LONG"), [4]);
        assert_eq!(lines(Rust, "/// ~\n    //! ~\nlet code = ~~;\n// ~"), [1, 2, 4]);
        assert_eq!(lines(Rust, "/// ```\n/// ~\n/// ```\n/// ~"), [4]);
        assert_eq!(lines(Python, "\"\"\"~\n~.\n\"\"\"\n~~\n    # ~"), [1, 2, 5]);
        assert_eq!(lines(Python, "x = \"\"\"~\n~~\n\"\"\"\n# ~\n\"\"\"~\"\"\"\ny(~)"), [4, 5]);
        assert_eq!(lines(Shell, "echo ~ # ~"), none);
        assert_eq!(lines(Shell, "  # ~"), [1]);
    }
}
