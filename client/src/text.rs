//! Names and foreign text: comparing them, and showing them so that nothing in them is hidden.

use std::cmp::Ordering;

/// Foreign text for people. Characters that would control a terminal, are not seen, or change where
/// others are seen stand there as `\u{202e}`; line breaks stay.
#[must_use]
pub fn printable(text: &str) -> String {
    escaped(text, |c| c != '\n' && is_hidden(c))
}

/// The same for text that must stay on one line.
#[must_use]
pub fn one_line(text: &str) -> String {
    escaped(text, is_hidden)
}

fn escaped(text: &str, hides: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if hides(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Whether a character does something instead of being seen: controls, the direction of text,
/// spaces without a width. The joiners that letters of some scripts need stay.
fn is_hidden(c: char) -> bool {
    let is_format = matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    is_format || c.is_control()
}

/// Natural order: `fork-2` before `fork-10`.
#[must_use]
pub fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while let (Some(l), Some(r)) = (left.chars().next(), right.chars().next()) {
        if l.is_ascii_digit() && r.is_ascii_digit() {
            let (x, y) = (digits(left), digits(right));
            let (x_value, y_value) = (x.trim_start_matches('0'), y.trim_start_matches('0'));
            let order = x_value.len().cmp(&y_value.len()).then_with(|| x_value.cmp(y_value));
            if order != Ordering::Equal {
                return order;
            }
            (left, right) = (&left[x.len()..], &right[y.len()..]);
        } else if l == r {
            (left, right) = (&left[l.len_utf8()..], &right[r.len_utf8()..]);
        } else {
            return l.cmp(&r);
        }
    }
    // Names with equal numbers, such as 1 and 01, still have an order.
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

fn digits(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_control_a_terminal_or_turn_itself_around() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\nc");
        assert_eq!(one_line("a\nb\u{7f}"), "a\\u{a}b\\u{7f}");
        assert_eq!(one_line("admin\u{202e}gnitset"), "admin\\u{202e}gnitset");
        for hidden in ['\u{200b}', '\u{2066}', '\u{feff}', '\u{85}', '\u{e0041}'] {
            assert_eq!(printable(&hidden.to_string()), hidden.escape_unicode().to_string());
        }
        for seen in ["team/agent", "é", "e\u{301}", "日本語", "עברית", "क्\u{200d}ष", "\\u{202e}", ""] {
            assert_eq!(one_line(seen), seen);
        }
    }

    #[test]
    fn forks_are_in_the_order_of_their_numbers() {
        let mut names = ["fork-10", "fork-2", "fork", "fork-1", "a10b3", "a10b12", "a9", "01", "1", "fork-18446744073709551617", "fork-3"];
        names.sort_by(|a, b| natural(a, b));
        let sorted = ["01", "1", "a9", "a10b3", "a10b12", "fork", "fork-1", "fork-2", "fork-3", "fork-10", "fork-18446744073709551617"];
        assert_eq!(names, sorted);
    }
}
