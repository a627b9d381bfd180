//! Text for people and terminals; numbers and times come from the library.

pub use pfr_client::human::{age, bytes, count, duration, number, until, utc};
pub use pfr_client::text::{natural, one_line, printable};

/// `2.61×`; ratios without a meaning are a dash.
pub fn ratio(value: f64) -> String {
    if value.is_finite() && value > 0.0 { format!("{value:.2}×") } else { "–".into() }
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    pfr_store::Clock::system().now()
}

/// Text without the user names and passwords of the addresses in it: `http://me:hush@host/x`
/// becomes `http://host/x`.
pub fn without_passwords(text: &str) -> String {
    text.split_inclusive(char::is_whitespace).map(without_password).collect()
}

/// The same for a word.
fn without_password(word: &str) -> String {
    const SCHEME: &str = "://";
    let quotes = || word.len() - word.trim_start_matches(['\'', '"']).len();
    let (before, address) = word.split_at(word.find(SCHEME).map_or_else(quotes, |at| at + SCHEME.len()));
    let (end, has_scheme) = (address.find(['/', '?', '#']).unwrap_or(address.len()), before.ends_with(SCHEME));
    let host = &address[..end];
    let hidden = match host.rsplit_once('@') {
        // Without a scheme and a path, this may be a reference with tag and digest.
        Some((user, _)) if has_scheme || (user.contains(':') && end < address.len()) => user.len() + 1,
        // The password has a `/`. Behind a host and its port, the `@` belongs to a digest.
        None if has_scheme && !may_have_port(host) => address.rfind('@').map_or(0, |at| at + 1),
        _ => 0,
    };
    format!("{before}{}", &address[hidden..])
}

/// Whether text is a host, as far as its port tells.
fn may_have_port(host: &str) -> bool {
    host.ends_with(']') || host.rsplit_once(':').is_none_or(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()))
}

/// Text in which every digest is cut to its first 12 hex digits.
pub fn short_digests(text: &str) -> String {
    const SHORTEST: usize = 64;
    let mut short = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        let (before, found) = rest.split_at(start);
        let (hex, after) = found.split_at(found.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(found.len()));
        short.push_str(before);
        short.push_str(if hex.len() < SHORTEST { hex } else { &hex[..12] });
        short.push_str(if hex.len() < SHORTEST { "" } else { "…" });
        rest = after;
    }
    short.push_str(rest);
    short
}

/// Columns that text takes, near enough: one for each character.
pub fn columns(text: &str) -> usize {
    text.chars().count()
}

/// Text with spaces up to `width` columns.
pub fn pad(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(columns(text))))
}

/// Text cut to `width` columns, with an ellipsis if something is gone.
pub fn clip(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut clipped: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        clipped.push('…');
    }
    clipped
}

/// Lines of at most `width` columns, broken at spaces; a longer word stays whole.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if columns(line) + 1 + columns(word) <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn durations_and_ratios() {
        let text = |s: f64| duration(Duration::from_secs_f64(s));
        assert_eq!([text(0.123), text(12.34), text(125.0), text(7260.0)], ["0.12 s", "12.3 s", "2 min 5 s", "2 h 1 min"]);
        assert_eq!([ratio(2.612), ratio(f64::NAN)], ["2.61×", "–"]);
    }

    #[test]
    fn ages_turn_into_dates_after_a_month() {
        let now = 1_709_251_199_000;
        assert_eq!([age(now, now), age(now - 5_000, now), age(now - 600_000, now)], ["just now", "5 s ago", "10 min ago"]);
        assert_eq!(age(now - 86_400_000 * 40, now), "2024-01-20");
        assert_eq!(age(now + 1000, now), "just now");
    }

    #[test]
    fn an_end_is_a_time_of_day_and_how_long_it_is_until_then() {
        let now = 1_709_251_199_000;
        let ends = |seconds: u64| until(now + seconds * 1000, now);
        assert_eq!([ends(0), ends(30), ends(3540)], ["now", "2024-03-01 00:00:29 UTC, in 30 s", "2024-03-01 00:58 UTC, in 59 min"]);
        let noon = now - 12 * 3_600_000;
        let ends = |seconds: u64| until(noon + seconds * 1000, noon);
        assert_eq!([ends(119), ends(120), ends(7200)], ["12:01:58 UTC, in 119 s", "12:01 UTC, in 2 min", "13:59 UTC, in 120 min"]);
        assert_eq!([ends(7201), ends(9000)], ["14:00 UTC, in 2 h", "14:29 UTC, in 3 h"]);
        assert_eq!([ends(86_400), ends(172_800)], ["2024-03-01 11:59 UTC, in 24 h", "2024-03-02 11:59 UTC, in 48 h"]);
        assert_eq!([ends(172_801), ends(864_000)], ["2024-03-02 12:00 UTC, in 2 days", "2024-03-10 11:59 UTC, in 10 days"]);
    }

    #[test]
    fn an_address_is_shown_without_user_and_password() {
        for (text, shown) in [
            ("http://me:hush@127.0.0.1:5077/team/agent:x", "http://127.0.0.1:5077/team/agent:x"),
            ("invalid 'https://hush@h/x' for \"http://a:hush@h?x\"", "invalid 'https://h/x' for \"http://h?x\""),
            ("http://me:hu@hush@h", "http://h"),
            ("http://me:hu/hush@h:1/x\nand", "http://h:1/x\nand"),
            ("'me:hush@h:1/x'", "'h:1/x'"),
        ] {
            assert_eq!(without_passwords(text), shown);
        }
        for harmless in
            ["http://h:1/a@2a19b2", "http://[::1]/a@2a19b2", "team/agent@sha256:2a/b", "agent:x@sha256:2a", "a  b\n", "at 12:30"]
        {
            assert_eq!(without_passwords(harmless), harmless);
        }
    }

    #[test]
    fn only_digests_are_shortened() {
        let hex = "0123456789abcdef".repeat(4);
        assert_eq!(short_digests(&format!("at 12, sha256:{hex} of é/{hex}")), "at 12, sha256:0123456789ab… of é/0123456789ab…");
        assert_eq!(short_digests("nothing here"), "nothing here");
    }

    #[test]
    fn wrapping_breaks_at_spaces_and_keeps_long_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a sha256:0123456789 b", 6), ["a", "sha256:0123456789", "b"]);
        assert_eq!(wrap("", 6), [""]);
    }

    #[test]
    fn clipping_counts_characters() {
        assert_eq!([clip("héllo", 5), clip("héllo", 4), clip("x", 0)], ["héllo", "hél…", ""]);
    }
}
