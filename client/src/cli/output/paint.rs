//! Colours, sparingly; none in a pipe, with `NO_COLOR`, or on a dumb terminal.

/// Marks up text.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    enabled: bool,
}

/// A style of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// No markup.
    #[default]
    Plain,
    /// Headings and names.
    Bold,
    /// Details.
    Dim,
    /// Good news.
    Green,
    /// Bad news.
    Red,
    /// Digests.
    Yellow,
    /// Tags.
    Cyan,
}

impl Paint {
    /// For a stream that is a terminal, or is not.
    pub fn for_stream(terminal: bool) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
        Self { enabled: terminal && !set("NO_COLOR") && !dumb }
    }

    /// No colours.
    pub const fn plain() -> Self {
        Self { enabled: false }
    }

    /// `text` in `style`. Line breaks stay outside of the markup.
    pub fn style(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Plain => "",
            Style::Bold => "1",
            Style::Dim => "2",
            Style::Green => "32",
            Style::Red => "1;31",
            Style::Yellow => "33",
            Style::Cyan => "36",
        };
        if !self.enabled || code.is_empty() || text.is_empty() {
            return text.to_owned();
        }
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// Headings and names.
    pub fn bold(self, text: &str) -> String {
        self.style(Style::Bold, text)
    }

    /// Details.
    pub fn dim(self, text: &str) -> String {
        self.style(Style::Dim, text)
    }

    /// Good news.
    pub fn green(self, text: &str) -> String {
        self.style(Style::Green, text)
    }

    /// Bad news.
    pub fn red(self, text: &str) -> String {
        self.style(Style::Red, text)
    }

    /// Digests.
    pub fn yellow(self, text: &str) -> String {
        self.style(Style::Yellow, text)
    }

    /// Tags.
    pub fn cyan(self, text: &str) -> String {
        self.style(Style::Cyan, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paint_adds_nothing() {
        assert_eq!(Paint::plain().red("x"), "x");
        assert_eq!(Paint { enabled: true }.dim("x"), "\x1b[2mx\x1b[0m");
    }
}
