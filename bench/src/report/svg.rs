//! Bars of GB/s: medians, with lines from the slowest to the fastest round.

use super::{Report, Row};
use crate::meter::Step;
use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 70.0;
const BAR: f64 = 16.0;

fn colour(contender: &str) -> &'static str {
    match contender {
        "pf" => "#2563eb",
        "docker-registry" => "#9ca3af",
        "write-only" => "#e5e7eb",
        _ => "#f59e0b",
    }
}

/// Renders a run.
pub fn render(report: &Report) -> String {
    let rows: Vec<Row<'_>> =
        report.rows().into_iter().filter(|row| matches!(row.step, Step::Push | Step::PullStore | Step::PullDir)).collect();
    let speed = |row: &Row<'_>, seconds: f64| row.samples.first().map_or(0.0, |s| s.raw_bytes as f64) / seconds / 1e9;
    let most = rows.iter().map(|row| speed(row, row.seconds.min)).fold(0.1, f64::max);
    let x = |gbs: f64| LEFT + gbs / most * (WIDTH - LEFT - RIGHT);
    let (mut body, mut y, mut group) = (String::new(), 44.0, None);
    let mut add = |text: String| body.write_fmt(format_args!("{text}\n")).unwrap_or_default();
    for row in &rows {
        if group != Some((row.place, row.step)) {
            group = Some((row.place, row.step));
            y += 14.0;
            add(format!("<text x=\"12\" y=\"{:.0}\" font-weight=\"bold\">{}, {}</text>", y + 4.0, row.place, row.step.name()));
            y += 10.0;
        }
        let (median, low, high) = (speed(row, row.seconds.median), speed(row, row.seconds.max), speed(row, row.seconds.min));
        let middle = y + BAR / 2.0;
        add(format!("<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>", LEFT - 8.0, middle + 4.0, row.contender));
        add(format!(
            "<rect x=\"{LEFT:.0}\" y=\"{y:.0}\" width=\"{:.1}\" height=\"{:.0}\" fill=\"{}\"/>",
            x(median) - LEFT,
            BAR - 2.0,
            colour(row.contender)
        ));
        add(format!("<path d=\"M{:.1} {middle:.1}H{:.1}\" stroke=\"#111\" stroke-width=\"1.5\"/>", x(low), x(high)));
        add(format!("<text x=\"{:.1}\" y=\"{:.0}\">{median:.2}</text>", x(high.max(median)) + 6.0, middle + 4.0));
        y += BAR;
    }
    let height = y + 20.0;
    let title = format!("GB/s of raw bytes, {} pages, {} × {}", report.pages, report.machine.cores, report.machine.cpu);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"14\">{title}</text>\n\
         <text x=\"12\" y=\"40\" fill=\"#555\">median of {} rounds; black lines: slowest to fastest round</text>\n{body}</svg>\n",
        report.rounds
    )
}
