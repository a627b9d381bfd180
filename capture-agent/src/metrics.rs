//! The names of all metrics, with description and unit, and the recorder behind `/metrics`.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::PrometheusHandle;

pub(crate) const REQUESTS: &str = "pf_agent_requests_total";
pub(crate) const PUSHES: &str = "pf_agent_pushes_total";
pub(crate) const PUSH_BYTES: &str = "pf_agent_push_bytes_total";
pub(crate) const PUSHES_OPEN: &str = "pf_agent_pushes_open";
pub(crate) const RESTORES: &str = "pf_agent_restores_total";
pub(crate) const RESTORE_SECONDS: &str = "pf_agent_restore_seconds";
pub(crate) const RESTORE_BYTES: &str = "pf_agent_restore_bytes_total";
pub(crate) const MATCHES: &str = "pf_agent_matches_total";
pub(crate) const FILLS: &str = "pf_agent_fills_total";
pub(crate) const SAVES: &str = "pf_agent_saves_total";
pub(crate) const TAKINGS: &str = "pf_agent_takings_total";
pub(crate) const JOBS: &str = "pf_agent_jobs_total";
pub(crate) const JOBS_OPEN: &str = "pf_agent_jobs_open";
pub(crate) const TRACES_DROPPED: &str = "pf_agent_traces_dropped_spans_total";
pub(crate) const WARM_BYTES: &str = "pf_agent_warm_bytes_total";

/// The recorder of the process.
///
/// # Errors
/// The reason, if another recorder was installed before.
pub fn recorder() -> Result<PrometheusHandle, String> {
    pfr_service::metrics::recorder(describe)
}

fn describe() {
    describe_counter!(REQUESTS, Unit::Count, "Requests on the control socket, by route and status.");
    describe_counter!(PUSHES, Unit::Count, "Attempts to push, by outcome: done, retried, failed.");
    describe_counter!(PUSH_BYTES, Unit::Bytes, "Bytes of frames sent to registries.");
    describe_gauge!(PUSHES_OPEN, Unit::Count, "Pushes that are neither done nor failed.");
    describe_counter!(RESTORES, Unit::Count, "Restores by outcome: ok, or the code of the refusal.");
    describe_histogram!(RESTORE_SECONDS, Unit::Seconds, "Time from a restore's request to its report.");
    describe_counter!(RESTORE_BYTES, Unit::Bytes, "Bytes of restores: pulled from registries, written to engines' memory.");
    describe_counter!(MATCHES, Unit::Count, "Requests of engines for state, by answer: ready, later, none.");
    describe_counter!(FILLS, Unit::Count, "Fills of engines' blocks by outcome: ok, or the code of the refusal.");
    describe_counter!(
        TAKINGS,
        Unit::Count,
        "Requests that a state lay ready for, by what became of them: taken, taken-on-kept, or why not."
    );
    describe_counter!(SAVES, Unit::Count, "Saves that requests asked for, by outcome: ok, or the code of the refusal.");
    describe_counter!(JOBS, Unit::Count, "Jobs that ended, by kind and outcome: done, failed, cancelled.");
    describe_gauge!(JOBS_OPEN, Unit::Count, "Jobs that are under way.");
    describe_counter!(TRACES_DROPPED, Unit::Count, "Spans that ended and never reached the collector of traces.");
    describe_counter!(WARM_BYTES, Unit::Bytes, "Bytes of frames that warm jobs fetched.");
    describe_counter!("pf_agent_snapshots_total", Unit::Count, "Snapshots by outcome: ok, or the code of the refusal.");
    describe_histogram!("pf_agent_snapshot_pause_seconds", Unit::Seconds, "How long an engine was paused for a snapshot.");
    describe_histogram!("pf_agent_snapshot_seconds", Unit::Seconds, "Time from a snapshot's request to its commit in the local store.");
    describe_counter!(
        "pf_agent_snapshot_bytes_total",
        Unit::Bytes,
        "Bytes of snapshots: resident in engines, moved, new to the store, stored for what is new, left raw for speed."
    );
    // A metric of an event that has not happened yet is 0, not absent.
    metrics::counter!(PUSH_BYTES).increment(0);
    metrics::gauge!(PUSHES_OPEN).increment(0.0);
    metrics::gauge!(JOBS_OPEN).increment(0.0);
    metrics::counter!(WARM_BYTES).increment(0);
}
