//! Patterns for names.

use crate::error::FormatError;
use crate::name::{name_error, text_newtype};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A name in which each `*` stands for any characters, `/` included. At most 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(String);
text_newtype!(Pattern, "pattern");

impl Pattern {
    /// Whether the whole name matches.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        matches(&self.0, name)
    }

    /// Whether every name matches.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.0.bytes().all(|byte| byte == b'*')
    }

    /// The characters with which every name that matches begins.
    #[must_use]
    pub fn literal_start(&self) -> &str {
        self.0.split('*').next().unwrap_or_default()
    }
}

impl FromStr for Pattern {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| name_error("pattern", text, reason);
        if !(1..=255).contains(&text.len()) {
            return Err(fail("expected 1 to 255 bytes"));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '*' | '.' | '_' | '-' | '/');
        if !text.chars().all(legal) {
            return Err(fail("expected letters, digits, '.', '_', '-', '/' and '*' for anything"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Whether the text matches a pattern in which each `*` stands for any characters.
#[must_use]
pub fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(head) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    // The first match of each part is as good as a later one: the next part may begin anywhere
    // behind it.
    for part in parts {
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text) in
            [("*", ""), ("*", "a/b"), ("team/*", "team/a/b"), ("a*b*c", "a-b-b-c"), ("*-1", "x-1-1"), ("a", "a"), ("a**", "a")]
        {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("team/*", "teams/a"), ("a*b", "ab-"), ("", "a"), ("a*a", "a"), ("*x*", "abc"), ("A", "a")] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn a_pattern_of_other_characters_is_refused() {
        for wrong in ["", "a b", "a:b", "a?", "ä", &"a".repeat(256)] {
            assert!(wrong.parse::<Pattern>().is_err(), "{wrong}");
        }
        let pattern = |text: &str| text.parse::<Pattern>().unwrap();
        assert!(pattern("*").is_everything() && pattern("**").is_everything() && !pattern("a*").is_everything());
        assert_eq!((pattern("team/*-x").literal_start(), pattern("*").literal_start(), pattern("a").literal_start()), ("team/", "", "a"));
    }
}
