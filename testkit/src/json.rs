//! The output of `--json`.

use serde_json::Value;

/// Puts a number where `--json` has a moment: `--json` gives moments as text, the API in
/// milliseconds.
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
