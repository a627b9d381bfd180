//! Numbers, sizes, times and digests for people.

use maud::{Markup, html};
use pfr_client::human;
use pfr_schema::Digest;

pub(super) use human::{bytes, count, number};

/// A time, as the distance from now; a tooltip has the time itself.
pub(super) fn ago(at: u64, now: u64) -> Markup {
    html! { time datetime=(human::rfc3339(at)) title=(human::utc(at)) { (human::age(at, now)) } }
}

/// When something ends or begins.
pub(super) fn until(at: u64, now: u64) -> Markup {
    html! { time datetime=(human::rfc3339(at)) title=(human::utc(at)) { (human::until(at, now)) } }
}

/// A digest that shows its first digits. Its text is complete, so that selecting it copies all.
pub(super) fn digest(digest: impl std::fmt::Display) -> Markup {
    html! { code.digest title=(digest) { (digest) } }
}

/// The first digits of a digest.
pub(super) fn short(digest: &Digest) -> Markup {
    html! { code { (digest.short()) } }
}

/// `2.61`: how many times larger.
pub(super) fn ratio(value: f64) -> String {
    format!("{value:.2} ×")
}

/// Something that is not known or does not apply.
pub(super) fn none(why: &str) -> Markup {
    html! { span.none title=(why) { "–" span.hidden { " (" (why) ")" } } }
}

/// Seconds as `5 min`, for intervals.
pub(super) fn interval(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
