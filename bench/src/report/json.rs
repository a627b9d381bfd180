//! Results as JSON: one line for each field of the run, and in a list one line for each case.
//!
//! A [`Spread`](super::Spread) is `[min, median, max]`. Numbers have four significant digits, since
//! another run differs by more. Nothing in a result names a host or a path.

use crate::Result;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;

/// Writes a result.
pub fn write(path: &Path, result: &impl Serialize) -> Result<()> {
    Ok(std::fs::write(path, render(result)?)?)
}

fn render(result: &impl Serialize) -> Result<String> {
    let fields: Map<String, Value> = serde_json::from_value(rounded(serde_json::to_value(result)?))?;
    let line = |(name, value): (&String, &Value)| match value {
        Value::Array(cases) if cases.iter().any(Value::is_object) => {
            let cases: Vec<String> = cases.iter().map(Value::to_string).collect();
            format!("\"{name}\":[\n{}\n]", cases.join(",\n"))
        }
        value => format!("\"{name}\":{value}"),
    };
    Ok(format!("{{\n{}\n}}\n", fields.iter().map(line).collect::<Vec<_>>().join(",\n")))
}

fn rounded(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => number.as_f64().and_then(|n| format!("{n:.3e}").parse::<f64>().ok()).into(),
        Value::Array(items) => items.into_iter().map(rounded).collect(),
        // Leave out what was not measured.
        Value::Object(fields) => {
            fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name, rounded(value))).collect()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Spread;
    use serde_json::json;

    #[test]
    fn each_case_is_a_line_and_all_of_it_is_json() {
        let spread = Spread { min: 0.123_456, median: 2.0, max: 123_456.7 };
        let result = json!({"pages": 123_456, "notes": ["a"], "cases": [{"seconds": spread, "missing": null}, {"seconds": spread}]});
        let text = render(&result).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let case = r#"{"seconds":[0.1235,2.0,123500.0]}"#;
        assert_eq!(lines, ["{", "\"cases\":[", &format!("{case},"), case, "],", "\"notes\":[\"a\"],", "\"pages\":123456", "}"]);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["cases"][1]["seconds"][1], 2.0);
    }
}
