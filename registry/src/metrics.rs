//! The names of all metrics, with description and unit, and the recorder behind `/metrics`.

use metrics::{Label, Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::PrometheusHandle;
use pfr_schema::DomainName;
use pfr_schema::api::{Quota, TaskInfo, TaskState};

pub(crate) const REQUESTS: &str = "pf_http_requests_total";
pub(crate) const DURATION: &str = "pf_http_request_duration_seconds";
pub(crate) const IN_FLIGHT: &str = "pf_http_in_flight_requests";
pub(crate) const CONNECTIONS: &str = "pf_http_open_connections";
pub(crate) const EVENT_STREAMS: &str = "pf_event_streams";
pub(crate) const TLS_EXPIRY: &str = "pf_tls_certificate_expiry_timestamp_seconds";
pub(crate) const TLS_FAILED: &str = "pf_tls_failed_handshakes_total";
pub(crate) const RELOAD_ERRORS: &str = "pf_reload_errors_total";
pub(crate) const ERRORS: &str = "pf_errors_total";
pub(crate) const BYTES_RECEIVED: &str = "pf_frames_received_bytes_total";
pub(crate) const BYTES_SENT: &str = "pf_frames_sent_bytes_total";
pub(crate) const BYTES_REDIRECTED: &str = "pf_frames_redirected_bytes_total";
pub(crate) const RAW_RECEIVED: &str = "pf_frames_received_raw_bytes_total";
pub(crate) const FRAMES_RECEIVED: &str = "pf_frames_received_total";
pub(crate) const FRAMES_NEW: &str = "pf_frames_new_total";
pub(crate) const CLAIMED: &str = "pf_claimed_blobs_total";
pub(crate) const COMING: &str = "pf_coming_blobs_total";
pub(crate) const LAPSED: &str = "pf_lapsed_claims_total";
pub(crate) const COMMITS: &str = "pf_commits_total";
pub(crate) const TAG_CONFLICTS: &str = "pf_tag_conflicts_total";
pub(crate) const ROWS_WRITTEN: &str = "pf_store_rows_written_total";
pub(crate) const DATABASE_UP: &str = "pf_database_up";
pub(crate) const DISK: &str = "pf_store_disk_bytes";
pub(crate) const PACKS: &str = "pf_store_packs";
pub(crate) const SMALL_PACKS: &str = "pf_store_small_packs";
pub(crate) const GC_RUNS: &str = "pf_gc_runs_total";
pub(crate) const GC_DURATION: &str = "pf_gc_duration_seconds";
pub(crate) const GC_OBJECTS: &str = "pf_gc_freed_objects_total";
pub(crate) const GC_FREED: &str = "pf_gc_freed_bytes_total";
pub(crate) const GC_MOVED: &str = "pf_gc_moved_bytes_total";
pub(crate) const GC_MERGED: &str = "pf_gc_merged_packs_total";
pub(crate) const GC_DELETED: &str = "pf_gc_deleted_bytes_total";
pub(crate) const GC_DUE: &str = "pf_gc_due_candidates";
pub(crate) const GC_DRAINING: &str = "pf_gc_draining_bytes";
pub(crate) const QUOTA_BYTES: &str = "pf_quota_bytes";
pub(crate) const QUOTA_USED_BYTES: &str = "pf_quota_used_bytes";
pub(crate) const QUOTA_OBJECTS: &str = "pf_quota_objects";
pub(crate) const QUOTA_USED_OBJECTS: &str = "pf_quota_used_objects";
pub(crate) const QUOTA_SNAPSHOTS: &str = "pf_quota_snapshots";
pub(crate) const QUOTA_USED_SNAPSHOTS: &str = "pf_quota_used_snapshots";
pub(crate) const RETENTION_DELETED: &str = "pf_retention_deleted_snapshots_total";
pub(crate) const RATE_LIMITED: &str = "pf_rate_limited_requests_total";
pub(crate) const THROTTLED: &str = "pf_throttled_bytes_total";
pub(crate) const TRACES_DROPPED: &str = "pf_traces_dropped_spans_total";
pub(crate) const AUDIT_MISSED: &str = "pf_audit_missed_records_total";
pub(crate) const AUDIT_LAG: &str = "pf_audit_file_lag_seconds";
pub(crate) const TASK_RUNS: &str = "pf_task_runs_total";
pub(crate) const TASK_ERRORS: &str = "pf_task_errors_total";
pub(crate) const TASK_BUSY: &str = "pf_task_busy_seconds";
pub(crate) const TASK_SUCCEEDED: &str = "pf_task_last_success_timestamp_seconds";
pub(crate) const TASK_RUNNING: &str = "pf_running_tasks";
pub(crate) const TASK_PAUSED: &str = "pf_paused_tasks";

/// The label of a metric that each domain has; none for the default one.
pub(crate) fn of_domain(domain: &DomainName) -> Vec<Label> {
    if domain.is_default() { Vec::new() } else { vec![Label::new("domain", domain.to_string())] }
}

/// Sets what a domain that is gone occupies.
pub(crate) fn forget(domain: &DomainName) {
    for name in [DISK, PACKS, SMALL_PACKS, GC_DUE, GC_DRAINING, QUOTA_USED_BYTES, QUOTA_USED_OBJECTS, QUOTA_USED_SNAPSHOTS] {
        metrics::gauge!(name, of_domain(domain)).set(0.0);
    }
}

/// Sets the gauges of a quota: only those of its limits. A limit that was taken back keeps its last
/// values until the process ends.
pub(crate) fn set_quota(domain: &DomainName, quota: &Quota) {
    for (limit, limit_name, used, used_name) in [
        (quota.limits.bytes, QUOTA_BYTES, quota.used_bytes, QUOTA_USED_BYTES),
        (quota.limits.objects, QUOTA_OBJECTS, quota.used_objects, QUOTA_USED_OBJECTS),
        (quota.limits.snapshots, QUOTA_SNAPSHOTS, quota.used_snapshots, QUOTA_USED_SNAPSHOTS),
    ] {
        if let Some(limit) = limit {
            metrics::gauge!(limit_name, of_domain(domain)).set(limit as f64);
            metrics::gauge!(used_name, of_domain(domain)).set(used as f64);
        }
    }
}

/// Sets the metrics of the background tasks of a domain.
pub(crate) fn set_tasks(domain: &DomainName, tasks: &[TaskInfo]) {
    for task in tasks {
        let labels = || [vec![Label::new("task", task.name.clone())], of_domain(domain)].concat();
        metrics::counter!(TASK_RUNS, labels()).absolute(task.runs);
        metrics::counter!(TASK_ERRORS, labels()).absolute(task.errors);
        metrics::gauge!(TASK_BUSY, labels()).set(task.busy_seconds);
        metrics::gauge!(TASK_SUCCEEDED, labels()).set(task.succeeded_at.unwrap_or(0) as f64 / 1e3);
        metrics::gauge!(TASK_RUNNING, labels()).set(if task.state == TaskState::Running { 1.0 } else { 0.0 });
        metrics::gauge!(TASK_PAUSED, labels()).set(if task.pause_ends_at.is_some() { 1.0 } else { 0.0 });
    }
}

/// The recorder of the process.
///
/// # Errors
/// The reason, if another recorder was installed before.
pub(crate) fn recorder() -> Result<PrometheusHandle, String> {
    pfr_service::metrics::recorder(describe)
}

fn describe() {
    describe_counter!(REQUESTS, Unit::Count, "Requests by route, method and status; `cut` where the client left before the end.");
    describe_histogram!(DURATION, Unit::Seconds, "Time from a request's headers to the last byte of its response.");
    describe_gauge!(IN_FLIGHT, Unit::Count, "Requests being served.");
    describe_gauge!(CONNECTIONS, Unit::Count, "Connections that are open.");
    describe_gauge!(EVENT_STREAMS, Unit::Count, "Clients that follow events.");
    describe_gauge!(TLS_EXPIRY, Unit::Seconds, "When the certificate in force expires, since 1970.");
    describe_counter!(TLS_FAILED, Unit::Count, "Connections that ended before the end of their TLS handshake, by reason.");
    describe_counter!(RELOAD_ERRORS, Unit::Count, "Certificates, token issuers and keys that were read again and could not be used.");
    describe_counter!(ERRORS, Unit::Count, "Requests that failed, by error code.");
    describe_counter!(BYTES_RECEIVED, Unit::Bytes, "Bytes of frame streams received, refused ones included.");
    describe_counter!(BYTES_SENT, Unit::Bytes, "Bytes of frame streams sent.");
    describe_counter!(BYTES_REDIRECTED, Unit::Bytes, "Bytes of frames that clients were told to fetch from the storage itself.");
    describe_counter!(RAW_RECEIVED, Unit::Bytes, "Raw bytes that received and stored frames stand for.");
    describe_counter!(FRAMES_RECEIVED, Unit::Count, "Frames received and stored.");
    describe_counter!(FRAMES_NEW, Unit::Count, "Frames received whose blobs the store did not have.");
    describe_counter!(CLAIMED, Unit::Count, "Missing blobs that pushes claimed.");
    describe_counter!(COMING, Unit::Count, "Answers that another push sends a blob.");
    describe_counter!(LAPSED, Unit::Count, "Claims that ended before their blob was stored, and that another push took over.");
    describe_counter!(COMMITS, Unit::Count, "Commits, by whether the repository did not have the snapshot before.");
    describe_counter!(TAG_CONFLICTS, Unit::Count, "Tag updates refused because the tag was not where the caller said.");
    describe_counter!(ROWS_WRITTEN, Unit::Count, "Metadata rows inserted, updated or deleted.");
    describe_gauge!(DATABASE_UP, Unit::Count, "1 if the databases of all open domains answered the scrape, else 0.");
    describe_gauge!(DISK, Unit::Bytes, "Bytes of all packs that are in use.");
    describe_gauge!(PACKS, Unit::Count, "Live packs: those that are neither being written nor waiting for their deletion.");
    describe_gauge!(SMALL_PACKS, Unit::Count, "Of these, packs with less than half of the bytes and of the frames of a full one.");
    describe_counter!(GC_RUNS, Unit::Count, "Collections that ended, by trigger and outcome.");
    describe_histogram!(GC_DURATION, Unit::Seconds, "Time that a collection took.");
    describe_counter!(GC_OBJECTS, Unit::Count, "Objects that collections deleted.");
    describe_counter!(GC_FREED, Unit::Bytes, "Bytes of the frames of deleted objects.");
    describe_counter!(GC_MOVED, Unit::Bytes, "Bytes of frames that compaction and merging copied.");
    describe_counter!(GC_MERGED, Unit::Count, "Small packs that were merged into others.");
    describe_counter!(GC_DELETED, Unit::Bytes, "Bytes of packs deleted from storage.");
    describe_gauge!(GC_DUE, Unit::Count, "Entries of the queue that the next collection looks at, up to 10,000.");
    describe_gauge!(GC_DRAINING, Unit::Bytes, "Bytes of packs that wait for the grace period, of at most 10,000 packs.");
    describe_gauge!(QUOTA_BYTES, Unit::Bytes, "Bytes of blobs that a domain may hold, if there is a limit.");
    describe_gauge!(QUOTA_USED_BYTES, Unit::Bytes, "Bytes of blobs that it holds, until a collection has freed them.");
    describe_gauge!(QUOTA_OBJECTS, Unit::Count, "Blobs that a domain may hold, if there is a limit.");
    describe_gauge!(QUOTA_USED_OBJECTS, Unit::Count, "Blobs that it holds.");
    describe_gauge!(QUOTA_SNAPSHOTS, Unit::Count, "Snapshots that a domain may hold, if there is a limit.");
    describe_gauge!(QUOTA_USED_SNAPSHOTS, Unit::Count, "Snapshots that it holds.");
    describe_counter!(RETENTION_DELETED, Unit::Count, "Snapshots that retention policies deleted.");
    describe_counter!(TRACES_DROPPED, Unit::Count, "Spans that ended and never reached the collector of traces.");
    describe_counter!(RATE_LIMITED, Unit::Count, "Requests refused with `rate_limited`, by the limit: token, address or domain.");
    describe_counter!(THROTTLED, Unit::Bytes, "Bytes of streams that had to wait for a limit on bytes a second, by direction.");
    describe_counter!(AUDIT_MISSED, Unit::Count, "Refused and failed requests whose record in the audit log could not be written.");
    describe_gauge!(AUDIT_LAG, Unit::Seconds, "Time for which the audit file could not be brought up to date; 0 while it can.");
    describe_counter!(TASK_RUNS, Unit::Count, "Runs of a background task that ended, by task.");
    describe_counter!(TASK_ERRORS, Unit::Count, "Of these, runs that failed.");
    describe_gauge!(TASK_BUSY, Unit::Seconds, "Time that runs of a background task took, all together.");
    describe_gauge!(TASK_SUCCEEDED, Unit::Seconds, "When a background task last succeeded in this process, since 1970; 0 if never.");
    describe_gauge!(TASK_RUNNING, Unit::Count, "1 while a background task runs, by task.");
    describe_gauge!(TASK_PAUSED, Unit::Count, "1 while a background task is paused, by task.");
    // A metric of an event that has not happened yet is 0, not absent.
    for name in [
        BYTES_RECEIVED,
        BYTES_SENT,
        BYTES_REDIRECTED,
        RAW_RECEIVED,
        FRAMES_RECEIVED,
        FRAMES_NEW,
        CLAIMED,
        COMING,
        LAPSED,
        TAG_CONFLICTS,
        ROWS_WRITTEN,
        GC_OBJECTS,
        GC_FREED,
        GC_MOVED,
        GC_MERGED,
        GC_DELETED,
        RETENTION_DELETED,
        AUDIT_MISSED,
    ] {
        metrics::counter!(name).increment(0);
    }
    for outcome in ["done", "failed"] {
        metrics::counter!(GC_RUNS, "trigger" => "schedule", "outcome" => outcome).increment(0);
    }
    for what in ["certificate", "issuers", "keys"] {
        metrics::counter!(RELOAD_ERRORS, "what" => what).increment(0);
    }
    for name in [IN_FLIGHT, CONNECTIONS, EVENT_STREAMS] {
        metrics::gauge!(name).increment(0.0);
    }
}
