//! Everything as JSON: the machine, the medians and each sample. Nothing in it names a host or a path.

use super::Report;
use crate::Result;
use serde_json::{Value, json};

/// Renders a run.
pub fn render(report: &Report) -> Result<String> {
    let rows: Vec<Value> = report
        .rows()
        .iter()
        .map(|row| {
            json!({
                "place": row.place, "step": row.step, "contender": row.contender, "seconds": row.seconds,
                "of_floor": row.of_floor, "processor_of_floor": row.processor_of_floor, "of_docker_registry": row.of_docker, "limit": row.limit,
            })
        })
        .collect();
    let mut document = json!({
        "machine": report.machine, "pages": report.pages, "rounds": report.rounds, "notes": report.notes,
        "rows": rows, "samples": report.samples,
    });
    if let (Some(date), Value::Object(fields)) = (&report.date, &mut document) {
        fields.insert("date".into(), json!(date));
    }
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}
