//! Results of captures and restores, each in one line.

use pfr_client::cli::output::human::{bytes, count, one_line};
use pfr_schema::agent::{RestoreReport, SnapshotReport};

/// Of a capture.
pub fn of_snapshot(report: &SnapshotReport) -> String {
    let known = match report.bytes_resident.saturating_sub(report.bytes_moved) {
        0 => String::new(),
        known => format!(", {} were there already", bytes(known)),
    };
    format!(
        "{}: {} copied from the engine to the local store{known}; engine paused for {:.1} ms",
        count(report.pages, "page"),
        bytes(report.bytes_moved),
        report.pause_seconds * 1000.0
    )
}

/// Of a restore.
pub fn of_restore(report: &RestoreReport) -> String {
    let name = report.sequence.as_deref().map(|sequence| format!("{}: ", one_line(sequence))).unwrap_or_default();
    let pulled =
        if report.bytes_pulled > 0 { format!("{} pulled from the registry", bytes(report.bytes_pulled)) } else { "nothing pulled".into() };
    let tensors = match report.values_computed + report.values_attested {
        0 => String::new(),
        n => format!(" and {}", count(n, "state tensor")),
    };
    format!("{name}{pulled}, {}{tensors} written and hashed, logits equal", count(report.pages, "page"))
}
