//! Wraps text at words while it arrives in pieces. It never overwrites output, so a pipe gets the
//! same as a terminal.

use pfr_client::cli::output::human::columns;
use pfr_client::cli::output::paint::{Paint, Style};

/// Running text.
#[derive(Debug)]
pub struct Prose {
    width: usize,
    indent: usize,
    paint: Paint,
    column: usize,
    /// Whether a space comes before the next word.
    space: bool,
    /// A word that may go on.
    word: Vec<(String, Style)>,
    told: String,
}

impl Prose {
    /// In lines of `width` columns after `indent` spaces.
    pub fn new(width: usize, indent: usize, paint: Paint) -> Self {
        Self { width, indent, paint, column: 0, space: false, word: Vec::new(), told: String::new() }
    }

    /// Begins with the title of the text; gives what is to be written.
    pub fn title(&mut self, title: &str) -> String {
        let mut written = " ".repeat(self.indent);
        for word in title.split(' ').filter(|word| !word.is_empty()) {
            self.word.push((word.to_owned(), Style::Cyan));
            written.push_str(&self.flush());
            self.space = true;
        }
        written
    }

    /// Returns the speaker's name in a column of its own, which begins the line.
    pub fn name(&mut self, name: char) -> String {
        let written = format!("{}{}  ", " ".repeat(self.indent), self.paint.cyan(&name.to_string()));
        self.indent += 3;
        self.width = self.width.saturating_sub(3);
        written
    }

    /// Takes a bit of text, and gives what is to be written now.
    pub fn bit(&mut self, text: &str, style: Style) -> String {
        self.told.push_str(text);
        let mut written = String::new();
        for c in text.chars() {
            if !c.is_whitespace() {
                match self.word.last_mut().filter(|(_, last)| *last == style) {
                    Some((word, _)) => word.push(c),
                    None => self.word.push((c.to_string(), style)),
                }
                continue;
            }
            written.push_str(&self.flush());
            if c == '\n' && self.column > 0 {
                written.push_str(&self.line());
            }
            self.space = self.column > 0;
        }
        written
    }

    /// Puts a sign where the text is.
    pub fn mark(&mut self, sign: &str, style: Style) {
        self.word.push((sign.to_owned(), style));
    }

    /// Gives what is left, and a line break.
    pub fn end(&mut self) -> String {
        let mut written = self.flush();
        written.push('\n');
        written
    }

    /// All of it, as it came.
    pub fn told(&self) -> &str {
        self.told.trim()
    }

    fn flush(&mut self) -> String {
        let width: usize = self.word.iter().map(|(part, _)| columns(part)).sum();
        if width == 0 {
            return String::new();
        }
        let mut written = String::new();
        if self.column > 0 && self.column + usize::from(self.space) + width > self.width {
            written.push_str(&self.line());
        } else if self.space {
            written.push(' ');
            self.column += 1;
        }
        self.space = false;
        self.column += width;
        self.word.drain(..).for_each(|(part, style)| written.push_str(&self.paint.style(style, &part)));
        written
    }

    fn line(&mut self) -> String {
        self.column = 0;
        self.space = false;
        format!("\n{}", " ".repeat(self.indent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(bits: &[&str], width: usize) -> (String, String) {
        let mut prose = Prose::new(width, 2, Paint::plain());
        let mut written: String = bits.iter().map(|bit| prose.bit(bit, Style::Plain)).collect();
        written.push_str(&prose.end());
        (written, prose.told().to_owned())
    }

    #[test]
    fn lines_break_between_words_however_the_words_come() {
        let whole = told(&["The old lighthouse keeper stood there."], 12).0;
        assert_eq!(whole, "The old\n  lighthouse\n  keeper stood\n  there.\n");
        assert_eq!(told(&["Th", "e o", "ld", " light", "house", " keep", "er", " stood", " there", "."], 12).0, whole);
    }

    #[test]
    fn paragraphs_are_lines_and_long_words_stay_whole() {
        let (written, told) = told(&[" a\n\n", "b unbreakable "], 4);
        assert_eq!(written, "a\n  b\n  unbreakable\n");
        assert_eq!(told, "a\n\nb unbreakable");
    }

    #[test]
    fn a_sign_stands_where_it_was_put_and_a_name_beside_the_text() {
        let mut prose = Prose::new(11, 1, Paint::plain());
        let mut written = prose.name('A');
        written.push_str(&prose.bit(" one", Style::Plain));
        prose.mark("◆", Style::Cyan);
        written.push_str(&prose.bit(", two", Style::Plain));
        written.push_str(&prose.end());
        assert_eq!(written, " A  one◆,\n    two\n");
    }

    #[test]
    fn a_title_is_wrapped_like_the_text() {
        let mut prose = Prose::new(9, 1, Paint::plain());
        let mut written = prose.title("“Tell it again.”");
        written.push_str(&prose.bit("And so", Style::Plain));
        written.push_str(&prose.end());
        assert_eq!(written, " “Tell it\n again.”\n And so\n");
    }
}
