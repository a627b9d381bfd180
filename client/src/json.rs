//! The output of `--json`, for all programs: one set of field names, times as text, and one shape
//! of errors.
//!
//! The name of a size in bytes is `bytes` or ends in `_bytes`. Moments are `at` or end in `_at`,
//! and are RFC 3339 in UTC. Tags are in natural order, as in text. Documents that are stored (a
//! manifest, a configuration, a page tree) are written as they are.

use crate::human::rfc3339;
use crate::text::natural;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt;

/// Stored documents, whose fields are not ours to name.
const STORED: [&str; 3] = ["manifest", "config", "trees"];
/// Sizes that the REST API names without their unit.
const SIZES: [&str; 7] = ["logical", "new", "shared", "exclusive", "unique", "stored", "disk"];

/// A result as `--json` writes it.
///
/// # Errors
/// The result has no form in JSON: a bug.
pub fn document<T: Serialize>(result: &T) -> serde_json::Result<Value> {
    serde_json::to_value(result).map(named)
}

fn named(value: Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.into_iter().map(named).collect()),
        Value::Object(fields) => Value::Object(fields.into_iter().map(field).collect::<Map<_, _>>()),
        other => other,
    }
}

fn field((name, value): (String, Value)) -> (String, Value) {
    if STORED.contains(&name.as_str()) {
        return (name, value);
    }
    if let (true, Some(at)) = (name == "at" || name.ends_with("_at"), value.as_u64()) {
        return (name, Value::String(rfc3339(at)));
    }
    let sized = value.is_number() || value.as_array().is_some_and(|pair| pair.iter().all(Value::is_number));
    let name = match name.strip_prefix("bytes_") {
        Some(what) => format!("{what}_bytes"),
        None if name == "other_bytes_only" => "other_only_bytes".to_owned(),
        None if sized && SIZES.contains(&name.as_str()) => format!("{name}_bytes"),
        None => name,
    };
    let value = if name == "tags" { in_order(named(value)) } else { named(value) };
    (name, value)
}

/// A list of tags, which are names or objects with a name, in natural order.
fn in_order(mut tags: Value) -> Value {
    if let Value::Array(tags) = &mut tags {
        let name = |tag: &Value| tag.as_str().or_else(|| tag["name"].as_str()).unwrap_or_default().to_owned();
        tags.sort_by(|a, b| natural(&name(a), &name(b)));
    }
    tags
}

/// An error as `--json` writes it: one object on one line of standard error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorDocument {
    /// One of the closed set of codes, or `interrupted`.
    pub code: &'static str,
    /// What, and where.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Whether the same command may succeed later.
    pub retryable: bool,
    /// Exit code of the process.
    pub exit_code: u8,
}

impl fmt::Display for ErrorDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sizes_and_times_have_one_form_and_stored_documents_keep_theirs() {
        let given = json!({
            "snapshots": [{"pushed_at": 951_782_400_123_u64, "logical": 1, "new": 3, "tags": []}],
            "at": 951_782_400_000_u64, "bytes_sent": 4, "other_bytes_only": [5, 6], "bytes_only": [7, 8], "finished_at": null, "new": "text",
            "config": {"created_at": 9, "bytes_x": 10}, "manifest": {"disk": 11},
        });
        let expected = json!({
            "snapshots": [{"pushed_at": "2000-02-29T00:00:00.123Z", "logical_bytes": 1, "new_bytes": 3, "tags": []}],
            "at": "2000-02-29T00:00:00.000Z", "sent_bytes": 4, "other_only_bytes": [5, 6], "only_bytes": [7, 8], "finished_at": null, "new": "text",
            "config": {"created_at": 9, "bytes_x": 10}, "manifest": {"disk": 11},
        });
        assert_eq!(document(&given).unwrap(), expected);
    }
}
