//! Bytes over time as a small line chart.

use super::words::bytes;
use maud::{Markup, html};
use pfr_client::human::utc;

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 120.0;
/// Points that a chart draws at most.
const DRAWN: usize = 300;

/// A chart of bytes at times (milliseconds since 1970), oldest first; nothing for less than two
/// points. Steps, because nothing is known between two points.
pub(super) fn steps(points: &[(u64, u64)], what: &str) -> Markup {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return html! {} };
    if points.len() < 2 || first.0 == last.0 {
        return html! {};
    }
    let most = points.iter().map(|point| point.1).max().unwrap_or(0);
    let words =
        format!("{what}: {} at {}, {} at {}; the most was {}", bytes(first.1), utc(first.0), bytes(last.1), utc(last.0), bytes(most));
    let x = |at: u64| WIDTH * (at - first.0) as f64 / (last.0 - first.0) as f64;
    let y = |bytes: u64| HEIGHT - (HEIGHT - 4.0) * bytes as f64 / most.max(1) as f64;
    let every = points.len().div_ceil(DRAWN);
    let drawn = points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i + 1 == points.len());
    let mut line = format!("M0 {:.1}", y(first.1));
    for (_, (at, bytes)) in drawn.skip(1) {
        line.push_str(&format!("H{:.1}V{:.1}", x(*at), y(*bytes)));
    }
    html! {
        figure.chart {
            svg viewBox="0 0 600 120" preserveAspectRatio="none" role="img" aria-label=(words) {
                title { (words) }
                path.area d={ (line) "V120H0Z" } {}
                path.line d=(line) {}
            }
            figcaption {
                p { (what) ", at most " strong { (bytes(most)) } }
                span { (utc(first.0)) } span { (utc(last.0)) }
            }
        }
    }
}
