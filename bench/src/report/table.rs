//! Prints the results as a Markdown table, so that they can be pasted into the documentation.

use super::{Report, Row, Spread};
use crate::meter::{Sample, Step};
use std::fmt::Write as _;

/// Goal: at most this many times the floor's time in the same run.
const OF_FLOOR: f64 = 2.5;
/// Goal: at least this many times docker-registry's speed in the same run.
const OF_DOCKER: f64 = 5.0;
/// Goals: raw bytes of `bf16` for each stored one.
const STORED: [(&str, f64); 2] = [("pf-hot", 1.37), ("pf-cold", 1.45)];

/// Renders a run.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let machine = &report.machine;
    let mut line = |text: String| out.write_fmt(format_args!("{text}\n")).unwrap_or_default();
    let systems: Vec<String> = machine.file_systems.iter().map(|(place, kind)| format!("{place} = {kind}")).collect();
    line(format!(
        "{} × {} {:?}, {} GiB, {}; {}; {} pages, {} rounds\n",
        machine.cores,
        machine.cpu,
        machine.extensions,
        machine.memory_gib,
        machine.kernel,
        systems.join(", "),
        report.pages,
        report.rounds
    ));
    for note in &report.notes {
        line(format!("{note}\n"));
    }
    line("| place | step | contender | seconds (min–max) | GB/s | × floor's time | × floor's CPU | × docker-registry's speed | CPU s | others' CPU s | limit | MiB client / server | MB moved | raw / stored | requests |".into());
    line("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|".into());
    let rows = report.rows();
    for row in &rows {
        line(cells(row));
    }
    line(String::new());
    for judgement in rows.iter().filter_map(judge) {
        line(judgement);
    }
    out
}

fn median(row: &Row<'_>, value: impl Fn(&Sample) -> Option<u64>, unit: u64) -> String {
    let spread = Spread::of(row.samples.iter().filter_map(|s| value(s)).map(|v| v as f64 / unit as f64));
    spread
        .map_or_else(|| "–".into(), |s| if unit == 1 || s.median >= 10.0 { format!("{:.0}", s.median) } else { format!("{:.2}", s.median) })
}

fn cells(row: &Row<'_>) -> String {
    let Spread { median: seconds, min, max } = row.seconds;
    let raw = row.samples.first().map_or(0, |s| s.raw_bytes) as f64;
    let moves_everything = matches!(row.step, Step::Push | Step::PullStore | Step::PullDir);
    let ratio = |spread: Option<Spread>| spread.map_or_else(|| "–".into(), |s| format!("{:.2} ({:.2}–{:.2})", s.median, s.min, s.max));
    let of = |value: fn(&Sample) -> f64| Spread::of(row.samples.iter().map(|s| value(s))).map_or(0.0, |s| s.median);
    let sync = of(|s| s.sync_seconds);
    let sync = if row.contender == "docker-registry" && sync > 0.05 { format!(" + {sync:.2} sync") } else { String::new() };
    format!(
        "| {} | {} | {} | {seconds:.2} ({min:.2}–{max:.2}){sync} | {} | {} | {} | {} | {:.2} | {:.2} | {} | {} / {} | {} | {} | {} |",
        row.place,
        row.step.name(),
        row.contender,
        if moves_everything { format!("{:.2}", raw / seconds / 1e9) } else { "–".into() },
        ratio(row.of_floor),
        row.processor_of_floor.map_or_else(|| "–".into(), |s| format!("{:.2}", s.median)),
        ratio(row.of_docker),
        of(|s| s.processor_seconds),
        of(|s| s.others_seconds),
        row.limit,
        median(row, |s| s.reported.client_memory, 1 << 20),
        median(row, |s| s.reported.server_memory, 1 << 20),
        median(row, |s| s.reported.bytes_moved, 1_000_000),
        raw_of_stored(row).map_or_else(|| "–".into(), |ratio| format!("{ratio:.3}")),
        median(row, |s| s.reported.round_trips, 1),
    )
}

/// Raw bytes for each stored one.
fn raw_of_stored(row: &Row<'_>) -> Option<f64> {
    let ratio = |sample: &&Sample| Some(sample.raw_bytes as f64 / sample.reported.stored_bytes? as f64);
    Spread::of(row.samples.iter().filter_map(ratio)).map(|spread| spread.median)
}

fn judge(row: &Row<'_>) -> Option<String> {
    if !row.contender.starts_with("pf-") {
        return None;
    }
    let verdict = |met: bool| if met { "met" } else { "MISSED" };
    let floor = row.of_floor.map(|s| format!("{:.2} × floor (goal ≤ {OF_FLOOR}: {})", s.median, verdict(s.median <= OF_FLOOR)));
    let docker =
        row.of_docker.map(|s| format!("{:.1} × docker-registry (goal ≥ {OF_DOCKER}: {})", s.median, verdict(s.median >= OF_DOCKER)));
    let goal = STORED.iter().find(|(contender, _)| *contender == row.contender).map(|(_, goal)| *goal);
    let stored =
        goal.zip(raw_of_stored(row)).map(|(goal, ratio)| format!("raw / stored {ratio:.3} (goal ≥ {goal}: {})", verdict(ratio >= goal)));
    let found: Vec<String> = floor.into_iter().chain(docker).chain(stored).collect();
    (!found.is_empty()).then(|| format!("* {}, {}, {}: {}", row.place, row.step.name(), row.contender, found.join(", ")))
}
