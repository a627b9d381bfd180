//! Load by fleet size, both axes logarithmic; lines where something gives out.

use super::model::{Fleet, Limit};
use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 110.0;

/// What a line shows: name, colour, value.
type Series = (&'static str, &'static str, fn(&Fleet) -> f64);

const SERIES: [Series; 6] = [
    ("pushes/s", "#2563eb", |f| f.pushes),
    ("objects/s in", "#f59e0b", |f| f.objects_in),
    ("GB/s in", "#059669", |f| f.bytes_in / 1e9),
    ("tables, GB", "#7c3aed", |f| f.database_bytes / 1e9),
    ("bucket, TB", "#9ca3af", |f| f.bucket_bytes / 1e12),
    ("cores at peak", "#dc2626", |f| f.cores),
];

/// Renders fleets.
pub fn render(fleets: &[Fleet], limits: &[Limit]) -> String {
    let hosts = |f: &Fleet| f.hosts.max(1e-9).log10();
    let (x0, x1) = (fleets.iter().map(hosts).fold(f64::MAX, f64::min).floor(), fleets.iter().map(hosts).fold(f64::MIN, f64::max).ceil());
    let values = || fleets.iter().flat_map(|f| SERIES.iter().map(move |(_, _, value)| value(f).max(1e-9).log10()));
    let (y0, y1) = (values().fold(f64::MAX, f64::min).floor(), values().fold(f64::MIN, f64::max).ceil());
    let x = |log: f64| LEFT + (log - x0) / (x1 - x0).max(1.0) * (WIDTH - LEFT - RIGHT);
    let y = |log: f64| HEIGHT - BOTTOM - (log - y0) / (y1 - y0).max(1.0) * (HEIGHT - TOP - BOTTOM);
    let mut body = String::new();
    let mut add = |text: String| body.write_fmt(format_args!("{text}\n")).unwrap_or_default();
    for power in x0 as i32..=x1 as i32 {
        let at = x(f64::from(power));
        add(format!("<path d=\"M{at:.1} {TOP}V{:.1}\" stroke=\"#e5e7eb\"/>", HEIGHT - BOTTOM));
        add(format!("<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>", HEIGHT - BOTTOM + 16.0, 10_f64.powi(power)));
    }
    for power in y0 as i32..=y1 as i32 {
        let at = y(f64::from(power));
        add(format!("<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#e5e7eb\"/>", WIDTH - RIGHT));
        add(format!("<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">10^{power}</text>", LEFT - 6.0, at + 4.0));
    }
    for (number, limit) in limits.iter().filter(|l| l.hosts.log10() > x0 && l.hosts.log10() < x1).enumerate() {
        let (at, row) = (x(limit.hosts.log10()), HEIGHT - BOTTOM + 32.0 + 13.0 * (number % 6) as f64);
        add(format!("<path d=\"M{at:.1} {TOP}V{row:.1}\" stroke=\"#111\" stroke-dasharray=\"3 4\" stroke-width=\"0.7\"/>"));
        add(format!("<text x=\"{:.1}\" y=\"{row:.1}\" font-size=\"10\">{} ({:.0})</text>", at + 3.0, limit.what, limit.hosts));
    }
    for (number, (name, colour, value)) in SERIES.iter().enumerate() {
        let points: Vec<String> = fleets.iter().map(|f| format!("{:.1},{:.1}", x(hosts(f)), y(value(f).max(1e-9).log10()))).collect();
        add(format!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", points.join(" ")));
        let row = TOP + 14.0 + 18.0 * number as f64;
        add(format!("<rect x=\"{:.1}\" y=\"{:.1}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>", WIDTH - RIGHT + 16.0, row - 6.0));
        add(format!("<text x=\"{:.1}\" y=\"{row:.1}\">{name}</text>", WIDTH - RIGHT + 36.0));
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text x=\"12\" y=\"22\" font-size=\"14\">Load by GPU hosts (means; \
         computed); dashed: what gives out</text>\n{body}</svg>\n"
    )
}
