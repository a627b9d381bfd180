//! Numbers, sizes and times for people.

use std::time::Duration;

/// `12.3 MiB`: three digits, binary units.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    // 1023.96 KiB would print as 1024 KiB.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// `12,345`.
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 page`, `12,345 pages`.
pub fn count(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", number(n), if n == 1 { "" } else { "s" })
}

/// `0.12 s`, `3.4 s`, `2 min 5 s`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 9.95 {
        return format!("{seconds:.2} s");
    }
    if seconds < 99.5 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    if whole < 3600 { format!("{} min {} s", whole / 60, whole % 60) } else { format!("{} h {} min", whole / 3600, whole / 60 % 60) }
}

/// `2.61×`; ratios without a meaning are a dash.
pub fn ratio(value: f64) -> String {
    if value.is_finite() && value > 0.0 { format!("{value:.2}×") } else { "–".into() }
}

/// How long before `now_ms` something happened, both in milliseconds since 1970; after a month, the day.
pub fn age(then_ms: u64, now_ms: u64) -> String {
    let seconds = now_ms.saturating_sub(then_ms) / 1000;
    match seconds {
        0..=1 => "just now".into(),
        2..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        172_800..=2_591_999 => format!("{} days ago", seconds / 86_400),
        _ => utc(then_ms)[..10].to_owned(),
    }
}

/// `2026-11-21 05:29:06 UTC`.
pub fn utc(ms: u64) -> String {
    let seconds = ms / 1000;
    let (year, month, day) = civil(seconds / 86_400);
    let time = seconds % 86_400;
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", time / 3600, time / 60 % 60, time % 60)
}

/// `15:04 UTC, in 59 min`: when something ends, both in milliseconds since 1970.
pub fn until(then_ms: u64, now_ms: u64) -> String {
    let text = utc(then_ms);
    let left = then_ms.saturating_sub(now_ms).div_ceil(1000);
    match left {
        0 => "now".into(),
        1..=119 => format!("{} UTC, in {left} s", &text[11..19]),
        120..=86_399 => format!("{} UTC, in {} min", &text[11..16], left.div_ceil(60)),
        _ => format!("{} UTC", &text[..16]),
    }
}

/// Year, month and day, `days` after 1970-01-01: the Gregorian calendar counted in eras of 400 years that start on 1 March.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    pfr_store::Clock::system().now()
}

/// Text from elsewhere without what could steer a terminal; line breaks stay.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// Text from elsewhere that must stay on one line.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
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

    #[test]
    fn sizes_have_three_digits_and_never_four() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 * 1024, "10.0 KiB"),
            (1023 * 1024, "1.00 MiB"),
            (123 << 20, "123 MiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (n, text) in cases {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([number(0), number(999), number(1000), number(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([count(1, "page"), count(2000, "page")], ["1 page", "2,000 pages"]);
    }

    #[test]
    fn durations_and_ratios() {
        let text = |s: f64| duration(Duration::from_secs_f64(s));
        assert_eq!([text(0.123), text(12.34), text(125.0), text(7260.0)], ["0.12 s", "12.3 s", "2 min 5 s", "2 h 1 min"]);
        assert_eq!([ratio(2.612), ratio(f64::NAN)], ["2.61×", "–"]);
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_709_251_199_000), "2024-02-29 23:59:59 UTC");
        assert_eq!(utc(4_107_542_400_000), "2100-03-01 00:00:00 UTC");
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
        let ends = [until(now, now), until(now + 30_000, now), until(now + 3_540_000, now), until(now + 90_000_000, now)];
        assert_eq!(ends, ["now", "00:00:29 UTC, in 30 s", "00:58 UTC, in 59 min", "2024-03-02 00:59 UTC"]);
    }

    #[test]
    fn foreign_text_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\u{fffd}[2Jb\nc");
        assert_eq!(one_line("a\nb"), "a\u{fffd}b");
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
