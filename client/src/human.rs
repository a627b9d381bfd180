//! Numbers, sizes and times for people, the same in all programs.

pub use pfr_service::units::{bytes, number};

use chrono::{DateTime, SecondsFormat, Utc};
use std::time::Duration;

/// `1 page`, `12,345 pages`.
#[must_use]
pub fn count(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", number(n), if n == 1 { "" } else { "s" })
}

/// `0.12 s`, `3.4 s`, `2 min 5 s`.
#[must_use]
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

/// `2026-11-21 05:29:06 UTC`, from milliseconds since 1970.
#[must_use]
pub fn utc(ms: u64) -> String {
    date(ms).format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// `2026-11-21T05:29:06.123Z`, from milliseconds since 1970.
#[must_use]
pub fn rfc3339(ms: u64) -> String {
    date(ms).to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// The time from `then_ms` to `now_ms`, both in milliseconds since 1970; after a month, the day.
#[must_use]
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

/// `15:04 UTC, in 59 min`: when something ends, both in milliseconds since 1970. If that is on
/// another day, with the date.
#[must_use]
pub fn until(then_ms: u64, now_ms: u64) -> String {
    let left = then_ms.saturating_sub(now_ms).div_ceil(1000);
    let span = match left {
        0 => return "now".into(),
        1..=119 => format!("{left} s"),
        120..=7200 => format!("{} min", left.div_ceil(60)),
        7201..=172_800 => format!("{} h", (left + 1800) / 3600),
        _ => format!("{} days", (left + 43_200) / 86_400),
    };
    // `2026-11-21 05:29:06 UTC`
    let (then, now) = (utc(then_ms), utc(now_ms));
    let from = if then[..10] == now[..10] { 11 } else { 0 };
    let to = if left < 120 { 19 } else { 16 };
    format!("{} UTC, in {span}", &then[from..to])
}

/// A number beyond all times becomes the last time.
fn date(ms: u64) -> DateTime<Utc> {
    i64::try_from(ms).ok().and_then(DateTime::from_timestamp_millis).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_their_noun() {
        assert_eq!([count(1, "page"), count(2000, "page")], ["1 page", "2,000 pages"]);
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_709_251_199_000), "2024-02-29 23:59:59 UTC");
        assert_eq!(utc(4_107_542_400_000), "2100-03-01 00:00:00 UTC");
    }

    #[test]
    fn moments_have_one_form_for_programs() {
        assert_eq!([rfc3339(0), rfc3339(951_782_400_007)], ["1970-01-01T00:00:00.000Z", "2000-02-29T00:00:00.007Z"]);
    }
}
