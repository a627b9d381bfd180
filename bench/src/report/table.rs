//! Prints the results as a Markdown table, so that they can be pasted into the documentation.

use super::{Report, Row, Spread};
use crate::meter::Sample;
use std::fmt::Write as _;

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
    for (contender, why) in &report.missing {
        line(format!("{contender}: not measured: {why}\n"));
    }
    line("| place | step | contender | seconds (min–max) | GB/s | CPU-s | CPU-s/GB (min–max) | × limit's CPU | × limit's time | × floor's CPU | × floor's time | × docker-registry's speed | others' CPU-s | bound by | MiB client / server | MB moved | raw / stored | requests |".into());
    line(format!("|{}", "---|".repeat(18)));
    for row in &report.rows() {
        line(cells(row));
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
    let ratio = |spread: Option<Spread>| spread.map_or_else(|| "–".into(), |s| format!("{:.2} ({:.2}–{:.2})", s.median, s.min, s.max));
    let middle = |spread: Option<Spread>| spread.map_or_else(|| "–".into(), |s| format!("{:.2}", s.median));
    let of = |value: fn(&Sample) -> f64| Spread::of(row.samples.iter().map(|s| value(s))).map_or(0.0, |s| s.median);
    let sync = of(|s| s.sync_seconds);
    // Time that a program leaves to others, which does not sync what it acknowledges.
    let sync = if sync > 0.05 { format!(" + {sync:.2} sync") } else { String::new() };
    format!(
        "| {} | {} | {} | {seconds:.2} ({min:.2}–{max:.2}){sync} | {} | {:.2} | {} | {} | {} | {} | {} | {} | {:.2} | {} | {} / {} | {} | {} | {} |",
        row.place,
        row.step.name(),
        row.contender,
        if row.step.moves_everything() { format!("{:.2}", raw / seconds / 1e9) } else { "–".into() },
        of(|s| s.processor_seconds),
        ratio(row.processor_per_gb),
        ratio(row.processor_of_limit),
        middle(row.of_limit),
        middle(row.processor_of_floor),
        middle(row.of_floor),
        ratio(row.of_docker),
        of(|s| s.others_seconds),
        row.bound_by,
        median(row, |s| s.reported.client_memory, 1 << 20),
        median(row, |s| s.server_memory, 1 << 20),
        median(row, |s| s.reported.bytes_moved, 1_000_000),
        Spread::of(row.samples.iter().filter_map(|s| s.raw_of_stored())).map_or_else(|| "–".into(), |s| format!("{:.3}", s.median)),
        median(row, |s| s.reported.round_trips, 1),
    )
}
