//! What captures and restores did, in a line.

use crate::cli::output::human::{bytes, count, one_line};
use pfr_schema::agent::{RestoreReport, SnapshotReport};

/// Of a capture.
pub fn of_snapshot(report: &SnapshotReport) -> String {
    format!(
        "{} of {} moved, {}; engine paused for {:.1} ms",
        bytes(report.bytes_moved),
        bytes(report.bytes_resident),
        count(report.pages, "page"),
        report.pause_seconds * 1000.0
    )
}

/// Of a restore.
pub fn of_restore(report: &RestoreReport) -> String {
    let name = report.sequence.as_deref().map(|sequence| format!("{}: ", one_line(sequence))).unwrap_or_default();
    let pulled = if report.bytes_pulled > 0 { format!("{} pulled", bytes(report.bytes_pulled)) } else { "nothing pulled".into() };
    let tensors = match report.values_computed + report.values_attested {
        0 => String::new(),
        n => format!(" and {}", count(n, "state tensor")),
    };
    format!("{name}{pulled}, {}{tensors} written and hashed, scores equal", count(report.pages, "page"))
}
