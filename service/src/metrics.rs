//! The recorder behind `/metrics`.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::OnceLock;

/// Upper bounds of the buckets of all durations, in seconds: a pause takes milliseconds, a large
/// transfer minutes.
const BUCKETS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// The recorder of the process, installed on first use: a process has one set of metrics, however
/// many servers run in it. `describe` tells it the descriptions and units of a server's metrics.
///
/// # Errors
/// The reason, if another recorder was installed before.
pub fn recorder(describe: fn()) -> Result<PrometheusHandle, String> {
    static RECORDER: OnceLock<Result<PrometheusHandle, String>> = OnceLock::new();
    let recorder = RECORDER.get_or_init(|| install().map_err(|e| e.to_string())).clone()?;
    describe();
    Ok(recorder)
}

fn install() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), BUCKETS)?.install_recorder()
}
