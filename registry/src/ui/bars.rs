//! Sizes as proportional bars. Each says in words what it shows.

use super::words::bytes;
use maud::{Markup, html};

/// Width of a bar in its own units; the page decides how wide it is drawn.
const WIDTH: f64 = 1000.0;
/// The least that can be seen.
const LEAST: f64 = 6.0;

/// A part of a bar: its class in the stylesheet, and its bytes.
pub(super) type Part<'a> = (&'a str, u64);

/// What a snapshot costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) new: u64,
    pub(super) shared: u64,
    pub(super) exclusive: u64,
}

/// A snapshot's cost beside that of the largest snapshot: above what it holds, shared and
/// exclusive; below what it added when it was pushed.
pub(super) fn cost(cost: Cost, most: u64) -> Markup {
    let Cost { new, shared, exclusive } = cost;
    let words = format!("{} exclusive, {} shared; {} were new", bytes(exclusive), bytes(shared), bytes(new));
    html! {
        svg.bar.cost viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label=(words) {
            title { (words) }
            rect.track x="0" y="0" width="1000" height="9" {}
            (row(&[("exclusive", exclusive), ("shared", shared)], most, 0, 9))
            (row(&[("new", new)], most, 11, 3))
        }
    }
}

/// Two sizes, one below the other, beside the largest of a list.
pub(super) fn pair(sizes: [Part<'_>; 2], most: u64) -> Markup {
    let words = sizes.map(|(name, size)| format!("{} {name}", bytes(size))).join(", ");
    html! {
        svg.bar.cost viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label=(words) {
            title { (words) }
            rect.track x="0" y="0" width="1000" height="14" {}
            (row(&sizes[..1], most, 0, 7))
            (row(&sizes[1..], most, 7, 7))
        }
    }
}

/// The parts of `all`. What is shown is said beside it.
pub(super) fn parts(parts: &[Part<'_>], all: u64, words: &str) -> Markup {
    html! {
        svg.bar.parts viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label=(words) {
            title { (words) }
            rect.track x="0" y="0" width="1000" height="20" {}
            (row(parts, all, 0, 20))
        }
    }
}

/// The key to the colours of [`cost`].
pub(super) fn key(entries: &[(&str, &str, &str)]) -> Markup {
    html! {
        ul.key {
            @for (class, name, meaning) in entries {
                li { svg.swatch viewBox="0 0 10 10" aria-hidden="true" { rect.(class) width="10" height="10" {} } " " strong { (name) } " " (meaning) }
            }
        }
    }
}

/// Parts side by side.
fn row(parts: &[Part<'_>], all: u64, y: u32, height: u32) -> Markup {
    let mut at = 0.0;
    let drawn = parts.iter().filter(|(_, bytes)| *bytes > 0).map(|(class, bytes)| {
        let width = (WIDTH * *bytes as f64 / all.max(1) as f64).clamp(LEAST, WIDTH);
        let x = at;
        at += width;
        (*class, x, width)
    });
    html! {
        @for (class, x, width) in drawn {
            rect.(class) x=(format!("{x:.1}")) y=(y) width=(format!("{width:.1}")) height=(height) {}
        }
    }
}
