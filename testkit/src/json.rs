//! The output of `--json`.

use serde_json::Value;

/// Replaces times, which `--json` gives as text, by numbers, as the API gives them in milliseconds.
pub fn without_moments(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_moments),
        Value::Object(fields) => {
            for (name, value) in fields {
                if name.ends_with("_at") && value.as_str().is_some_and(|text| text.ends_with('Z')) {
                    *value = 1.into();
                }
                without_moments(value);
            }
        }
        _ => {}
    }
}
