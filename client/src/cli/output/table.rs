//! Aligned columns without borders, fitted to the terminal.

use super::human::{clip, columns, one_line};
use super::paint::{Paint, Style};

/// Spaces between columns.
const GAP: usize = 2;
/// The least width of a clipped column.
const NARROWEST: usize = 10;

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    right: bool,
    optional: bool,
    fixed: bool,
    style: Style,
}

impl Column {
    /// Text, to the left.
    pub const fn left(title: &'static str) -> Self {
        Self { title, right: false, optional: false, fixed: false, style: Style::Plain }
    }

    /// Numbers, to the right.
    pub const fn right(title: &'static str) -> Self {
        Self { title, right: true, optional: false, fixed: true, style: Style::Plain }
    }

    /// Left out if it is empty and, the last first, where the terminal is too narrow.
    pub const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Never clipped.
    pub const fn fixed(self) -> Self {
        Self { fixed: true, ..self }
    }

    /// The style of its cells.
    pub const fn style(self, style: Style) -> Self {
        Self { style, ..self }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: impl Into<Vec<Column>>) -> Self {
        Self { columns: columns.into(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty. Cells may be foreign text.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        let cells: Vec<String> = cells.into();
        let mut cells: Vec<String> = cells.iter().map(|cell| one_line(cell)).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// The lines. In a pipe (`width` is none) nothing is left out or clipped.
    pub fn render(&self, paint: &Paint, width: Option<usize>) -> Vec<String> {
        let mut widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                let cells = self.rows.iter().map(|row| columns(&row[i])).max().unwrap_or(0);
                cells.max(columns(self.columns[i].title))
            })
            .collect();
        let filled = |i: usize| !self.columns[i].optional || self.rows.iter().any(|row| !row[i].is_empty());
        let mut shown: Vec<usize> = (0..self.columns.len()).filter(|&i| filled(i)).collect();
        if let Some(width) = width {
            self.fit(&mut widths, &mut shown, width);
        }
        let line = |cells: &dyn Fn(usize) -> (String, Style)| {
            let mut line = String::new();
            for (n, &i) in shown.iter().enumerate() {
                let (text, style) = cells(i);
                let text = clip(&text, widths[i]);
                let blank = " ".repeat(widths[i].saturating_sub(columns(&text)));
                let text = paint.style(style, &text);
                if n > 0 {
                    line.push_str(&" ".repeat(GAP));
                }
                line.push_str(&if self.columns[i].right { format!("{blank}{text}") } else { format!("{text}{blank}") });
            }
            line.trim_end().to_owned()
        };
        let mut lines = vec![line(&|i| (self.columns[i].title.to_owned(), Style::Dim))];
        lines.extend(self.rows.iter().map(|row| line(&|i| (row[i].clone(), self.columns[i].style))));
        lines
    }

    /// Leaves out optional columns, then clips the widest text, until a line fits.
    fn fit(&self, widths: &mut [usize], shown: &mut Vec<usize>, width: usize) {
        let total =
            |widths: &[usize], shown: &[usize]| shown.iter().map(|&i| widths[i]).sum::<usize>() + GAP * shown.len().saturating_sub(1);
        while total(widths, shown) > width {
            let Some(last) = shown.iter().rposition(|&i| self.columns[i].optional) else { break };
            shown.remove(last);
        }
        while total(widths, shown) > width {
            let widest = shown.iter().copied().filter(|&i| !self.columns[i].fixed && widths[i] > NARROWEST).max_by_key(|&i| widths[i]);
            let Some(widest) = widest else { break };
            let over = total(widths, shown) - width;
            widths[widest] = widths[widest].saturating_sub(over).max(NARROWEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new([Column::left("NAME"), Column::right("SIZE"), Column::left("NOTE").optional()]);
        table.row(["team/agent-with-a-long-name".into(), "1".into(), "hello".into()]);
        table.row(["x".into(), "12345".into()]);
        table
    }

    #[test]
    fn columns_line_up_and_lines_do_not_trail() {
        let lines = sample().render(&Paint::plain(), None);
        assert_eq!(
            lines,
            ["NAME                          SIZE  NOTE", "team/agent-with-a-long-name      1  hello", "x                            12345"]
        );
    }

    #[test]
    fn empty_optional_columns_are_left_out() {
        let mut table = Table::new([Column::left("A").optional(), Column::left("B")]);
        table.row([String::new(), "x".into()]);
        assert_eq!(table.render(&Paint::plain(), None), ["B", "x"]);
    }

    #[test]
    fn a_cell_shows_what_it_would_hide() {
        let mut table = Table::new([Column::left("LABEL"), Column::left("B")]);
        table.row(["a\u{202e}b\n".into(), "x".into()]);
        assert_eq!(table.render(&Paint::plain(), None), ["LABEL            B", "a\\u{202e}b\\u{a}  x"]);
    }

    #[test]
    fn narrow_terminals_lose_optional_columns_then_characters() {
        let widest = |width| sample().render(&Paint::plain(), Some(width)).iter().map(|l| columns(l)).max().unwrap();
        assert_eq!([widest(80), widest(36), widest(25)], [41, 34, 25]);
        assert!(sample().render(&Paint::plain(), Some(25))[1].starts_with("team/agent-with-a…"));
    }
}
