//! Compares the output of a program with what a page shows.
//!
//! `…` stands for any text in a line, and alone on a line for any lines. Text that differs each
//! time (digests, ids, times) and the widths of columns do not count. Everything else counts, sizes
//! too, since the pushed pages are generated from a seed.

/// Compares; the error names the first line that was not found.
pub fn compare(shown: &[String], actual: &str) -> Result<(), String> {
    let shown: Vec<String> = shown.iter().map(|line| normal(line)).filter(|line| !line.is_empty()).collect();
    let actual: Vec<String> = actual.lines().map(normal).filter(|line| !line.is_empty()).collect();
    if lines_match(&shown, &actual) {
        return Ok(());
    }
    let gone = shown.iter().find(|shown| *shown != "…" && !actual.iter().any(|actual| line_matches(shown, actual)));
    let why = gone.map_or("the lines are others, or in another order".to_owned(), |line| format!("no line is like {line:?}"));
    Err(format!("{why}\nprinted, with what varies taken out:\n  {}", actual.join("\n  ")))
}

fn lines_match(shown: &[String], actual: &[String]) -> bool {
    match shown.split_first() {
        None => actual.is_empty(),
        Some((first, rest)) if first == "…" => (0..=actual.len()).any(|skip| lines_match(rest, &actual[skip..])),
        Some((first, rest)) => actual.split_first().is_some_and(|(line, more)| line_matches(first, line) && lines_match(rest, more)),
    }
}

fn line_matches(shown: &str, actual: &str) -> bool {
    let mut parts = shown.split('…').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = actual.strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// A line with single spaces, and marks in place of what varies.
pub fn normal(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let at_word = !(before.is_alphanumeric() || matches!(before, '_' | '.' | '-'));
        if at_word && let Some((length, mark)) = varies(rest) {
            out.push_str(mark);
            rest = &rest[length..];
            before = '>';
        } else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            before = c;
        }
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How long what varies is at the start of `text`, and what stands for it.
fn varies(text: &str) -> Option<(usize, &'static str)> {
    let hex = |text: &str| text.bytes().take_while(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')).count();
    let ends = |length: usize| !text[length..].starts_with(|c: char| c.is_alphanumeric() || c == '_');
    if let Some(digest) = text.strip_prefix("sha256:") {
        let length = hex(digest);
        let cut = digest[length..].starts_with('…');
        return (cut || length >= 6).then_some((7 + length + if cut { '…'.len_utf8() } else { 0 }, "<digest>"));
    }
    if let Some(length) = shape(text, "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") {
        return Some((length, "<id>"));
    }
    if let Some(length) = shape(text, "0000-00-00T00:00:00").or_else(|| shape(text, "0000-00-00 00:00")) {
        let more = text[length..].bytes().take_while(|b| b.is_ascii_digit() || matches!(b, b':' | b'.' | b'Z')).count();
        return Some((length + more, "<time>"));
    }
    let length = hex(text);
    if matches!(length, 12 | 64) && ends(length) {
        return Some((length, "<digest>"));
    }
    let digits = text.bytes().take_while(|b| b.is_ascii_digit() || matches!(b, b'.' | b',')).count();
    if digits > 0 && text.starts_with(|c: char| c.is_ascii_digit()) {
        let space = usize::from(text[digits..].starts_with(' '));
        let units = ["ms", "min", "seconds", "second", "s", "h"];
        return units.into_iter().find_map(|unit| {
            let length = digits + space + unit.len();
            (text[digits + space..].starts_with(unit) && ends(length)).then_some((length, "<time>"))
        });
    }
    None
}

/// The length of `pattern` if `text` begins like it: `0` is a digit, `x` a hex digit, anything else
/// itself.
fn shape(text: &str, pattern: &str) -> Option<usize> {
    let like = |(t, p): (u8, u8)| match p {
        b'0' => t.is_ascii_digit(),
        b'x' => t.is_ascii_hexdigit(),
        _ => t == p,
    };
    (text.len() >= pattern.len() && text.bytes().zip(pattern.bytes()).all(like)).then_some(pattern.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(shown: &str, actual: &str) -> bool {
        compare(&shown.lines().map(str::to_owned).collect::<Vec<_>>(), actual).is_ok()
    }

    #[test]
    fn digests_times_and_columns_do_not_count() {
        let shown = "DIGEST        TAG\n0123456789ab  step-1  11.2 MiB  2 s ago\nsha256:00aa11… in 0.3 s\n";
        let line = format!("DIGEST TAG\nba9876543210 step-1 11.2 MiB 41 ms ago\nsha256:{} in 12 ms", "f".repeat(64));
        assert!(matches(shown, &line), "{:?}", compare(&shown.lines().map(str::to_owned).collect::<Vec<_>>(), &line));
        assert_eq!(normal("at 2026-11-22T05:06:07.123Z, id 0193c2a4-aaaa-7bbb-8ccc-0123456789ab"), "at <time>, id <id>");
    }

    #[test]
    fn everything_else_counts() {
        assert!(!matches("12 pages", "13 pages"));
        assert!(!matches("1.2 MiB", "1.3 MiB"));
        assert!(!matches("a", "a\nb"));
        assert!(!matches("a\nb", "a"));
        assert!(!matches("a\nb", "b\na"));
        assert!(!matches("exit code 4", "exit code 40"));
    }

    #[test]
    fn an_ellipsis_stands_for_text_or_for_lines() {
        assert!(matches("{\"a\":…,\"b\":2}", "{\"a\":[1,\"x\"],\"b\":2}"));
        assert!(!matches("{\"a\":…,\"b\":2}", "{\"a\":1,\"b\":3}"));
        assert!(matches("a\n…\nd", "a\nb\nc\nd") && matches("a\n…", "a") && !matches("a\n…\nd", "a\nb"));
    }
}
