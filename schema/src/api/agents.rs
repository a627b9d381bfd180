//! Reports of capture agents: what the hosts of a fleet have and do.

use crate::agent::JobState;
use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::AgentName;
use serde::{Deserialize, Serialize};

api! {
    // Unlike other requests, a report may have fields that are not known here, in its engines and
    // jobs too: agents are often upgraded before their registry, and one that says more than the
    // registry can show must not go missing from the fleet. They are read over and not kept, so the
    // bounds of `check` hold for all that is kept, and the limit on bodies for the rest.
    /// What a capture agent tells a registry of itself. Each report replaces the one before. A
    /// registry ignores fields that it does not know.
    #[derive(Eq)]
    pub struct AgentReport {
        /// The version of the agent.
        #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, example = "0.1.0"))]
        pub version: String,
        /// Seconds until the next report, at most.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 3600))]
        pub interval_seconds: u64,
        /// The engines of its host.
        #[cfg_attr(feature = "openapi", schema(max_items = 64))]
        pub engines: Vec<AgentEngine>,
        /// Its drains and warms: those under way, and those that ended not long ago.
        #[cfg_attr(feature = "openapi", schema(max_items = 32))]
        pub jobs: Vec<AgentJob>,
        /// Whether it has ended in order, so that no other report follows until it is started
        /// again.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub stopped: bool,
    }

    /// An engine of a host.
    #[derive(Eq)]
    pub struct AgentEngine {
        /// Its name.
        #[cfg_attr(feature = "openapi", schema(max_length = 128, example = "vllm-0"))]
        pub engine: String,
        /// The model that it serves, if its engine configuration says so.
        #[cfg_attr(feature = "openapi", schema(max_length = 128))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub model: Option<String>,
        /// Digest of its engine configuration.
        pub fingerprint: Digest,
        /// Whether it can be captured or restored into.
        pub state: AgentEngineState,
        /// What it is busy with, or what is missing.
        #[cfg_attr(feature = "openapi", schema(max_length = 128))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub note: Option<String>,
        /// Snapshots taken since it registered.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub snapshots: u64,
        /// Restores since it registered.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub restores: u64,
        /// Snapshots that lie ready for its requests.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub staged: u64,
    }

    /// A drain or a warm of a host.
    #[derive(Eq)]
    pub struct AgentJob {
        /// Its id.
        #[cfg_attr(feature = "openapi", schema(max_length = 128))]
        pub id: String,
        /// What it does.
        pub kind: AgentJobKind,
        /// The repository that a drain pushes to, or the first reference of a warm. A registry
        /// shows it, and `note`, only to callers that see all repositories.
        #[cfg_attr(feature = "openapi", schema(max_length = 128))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub about: Option<String>,
        /// How far it is.
        pub state: JobState,
        /// Milliseconds since 1970, UTC, of its begin.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub started_at: u64,
        /// The same of its end.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub finished_at: Option<u64>,
        /// Raw bytes that were fetched, or captured.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub bytes_done: u64,
        /// Raw bytes to fetch or capture; 0 until known.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        pub bytes_total: u64,
        /// Seconds that the rest takes at the rate so far.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 9_007_199_254_740_991_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub seconds_left: Option<u64>,
        /// Why it waits now, or its first failure.
        #[cfg_attr(feature = "openapi", schema(max_length = 128))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub note: Option<String>,
    }

    /// An agent, as it reported last.
    #[derive(Eq)]
    pub struct AgentInfo {
        /// Its name.
        pub name: AgentName,
        /// Milliseconds since 1970, UTC, of its last report.
        pub seen_at: u64,
        /// Whether three of its intervals have passed without a report. The report says what was,
        /// and not what is.
        pub silent: bool,
        /// The label of the token with which it reported; absent if it needed none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub label: Option<String>,
        /// Its last report.
        pub report: AgentReport,
    }

    /// One page of agents, by name.
    #[derive(Eq)]
    pub struct AgentList {
        /// The agents.
        pub agents: Vec<AgentInfo>,
        /// Cursor of the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }
}

/// Whether an engine of a host can be captured or restored into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AgentEngineState {
    /// It can.
    Ready,
    /// A capture or a restore is under way.
    Busy,
    /// Some of its ranks have not registered.
    Incomplete,
}

/// The kinds of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AgentJobKind {
    /// It pulls snapshots ahead of the restores that need them.
    Warm,
    /// It captures and pushes everything on its host.
    Drain,
}

impl AgentReport {
    /// Engines in a report.
    pub const ENGINES: usize = 64;
    /// Jobs in a report.
    pub const JOBS: usize = 32;
    /// Characters of a text in a report.
    pub const TEXT: usize = 128;
    /// The longest interval, in seconds.
    pub const LONGEST_INTERVAL: u64 = 3600;
    /// The greatest number of a report: every program that reads JSON knows it exactly.
    pub const MOST: u64 = 9_007_199_254_740_991;
    /// Intervals without a report after which an agent is silent.
    const PATIENCE: u64 = 3;
    /// Seconds without a report after which an agent is silent, whatever its interval.
    pub const LONGEST_PATIENCE: u64 = Self::LONGEST_INTERVAL * Self::PATIENCE;

    /// Whether an agent that reported this at `seen_at` is silent at `now`, in milliseconds.
    #[must_use]
    pub fn is_silent(&self, seen_at: u64, now: u64) -> bool {
        let patience = self.interval_seconds.saturating_mul(1000 * Self::PATIENCE);
        now.saturating_sub(seen_at) > patience
    }

    /// Refuses a report beyond the bounds of its fields.
    ///
    /// # Errors
    /// [`FormatError::Field`] with the place, what was expected there and what was found.
    pub fn check(&self) -> Result<(), FormatError> {
        let fail = |path: &str, expected: String, found: String| Err(FormatError::field("report", format!("$.{path}"), expected, found));
        if self.version.is_empty() {
            return fail("version", "the version of the agent".into(), "nothing".into());
        }
        if !(1..=Self::LONGEST_INTERVAL).contains(&self.interval_seconds) {
            return fail("interval_seconds", format!("1 to {}", Self::LONGEST_INTERVAL), self.interval_seconds.to_string());
        }
        for (path, found, most) in [("engines", self.engines.len(), Self::ENGINES), ("jobs", self.jobs.len(), Self::JOBS)] {
            if found > most {
                return fail(path, format!("at most {most}"), found.to_string());
            }
        }
        let of_engines = self.engines.iter().flat_map(|engine| [Some(&engine.engine), engine.model.as_ref(), engine.note.as_ref()]);
        let of_jobs = self.jobs.iter().flat_map(|job| [Some(&job.id), job.about.as_ref(), job.note.as_ref()]);
        let mut texts = of_engines.chain(of_jobs).chain([Some(&self.version)]).flatten();
        if let Some(text) = texts.find(|text| text.chars().count() > Self::TEXT) {
            return fail("*", format!("texts of at most {} characters", Self::TEXT), text.clone());
        }
        let of_engines = self.engines.iter().flat_map(|engine| [engine.snapshots, engine.restores, engine.staged]);
        let of_jobs = self.jobs.iter().flat_map(|job| {
            let (finished_at, seconds_left) = (job.finished_at.unwrap_or_default(), job.seconds_left.unwrap_or_default());
            [job.started_at, finished_at, job.bytes_done, job.bytes_total, seconds_left]
        });
        if let Some(found) = of_engines.chain(of_jobs).find(|number| *number > Self::MOST) {
            return fail("*", format!("numbers of at most {}", Self::MOST), found.to_string());
        }
        Ok(())
    }
}

impl AgentInfo {
    /// Whether its report says what was, and not what is: it is silent, or has ended in order.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.silent || self.report.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn report() -> Value {
        let fingerprint = Digest::sha256(b"configuration");
        json!({
            "version": "0.1.0", "interval_seconds": 30,
            "engines": [{"engine": "e", "fingerprint": fingerprint, "state": "ready", "snapshots": 1, "restores": 0, "staged": 0}],
            "jobs": [{"id": "j", "kind": "drain", "about": "team/away", "state": "running", "started_at": 1, "bytes_done": 2, "bytes_total": 3}],
        })
    }

    /// What becomes of a report with a value at a place.
    fn with(place: &str, value: Value) -> Result<(), String> {
        let mut report = report();
        *report.pointer_mut(place).unwrap() = value;
        serde_json::from_value::<AgentReport>(report).map_err(|e| e.to_string())?.check().map_err(|e| e.to_string())
    }

    #[test]
    fn a_report_beyond_its_bounds_is_refused_with_what_is_expected() {
        let right: AgentReport = serde_json::from_value(report()).unwrap();
        assert_eq!(right.check(), Ok(()));
        assert_eq!(serde_json::to_value(&right).unwrap(), report());
        let (engine, job) = (report()["engines"][0].clone(), report()["jobs"][0].clone());
        for (place, value, word) in [
            ("/version", json!(""), "version"),
            ("/version", json!("v".repeat(129)), "128 characters"),
            ("/interval_seconds", json!(0), "1 to 3600"),
            ("/interval_seconds", json!(3601), "1 to 3600"),
            ("/engines", json!(vec![engine; 65]), "at most 64"),
            ("/jobs", json!(vec![job; 33]), "at most 32"),
            ("/engines/0/engine", json!("é".repeat(129)), "128 characters"),
            ("/jobs/0/about", json!("a".repeat(129)), "128 characters"),
            ("/engines/0/snapshots", json!(AgentReport::MOST + 1), "9007199254740991"),
            ("/jobs/0/bytes_total", json!(AgentReport::MOST + 1), "9007199254740991"),
            ("/engines/0/state", json!("asleep"), "asleep"),
            ("/jobs/0/kind", json!("rest"), "rest"),
            ("/engines/0/fingerprint", json!("sha256:1"), "digest"),
        ] {
            let error = with(place, value).unwrap_err();
            assert!(error.contains(word), "{place}: {error}");
        }
        assert_eq!(with("/engines/0/engine", json!("é".repeat(128))), Ok(()));
    }

    #[test]
    fn fields_of_a_newer_agent_are_read_over_and_not_kept() {
        let right: AgentReport = serde_json::from_value(report()).unwrap();
        let long = "x".repeat(AgentReport::TEXT + 1);
        for place in ["", "/engines/0", "/jobs/0"] {
            for more in [json!(1), json!(null), json!([{"deep": [long]}]), json!({"state": "asleep"})] {
                let mut newer = report();
                newer.pointer_mut(place).unwrap()["more"] = more.clone();
                let read: AgentReport = crate::json::parse("report", newer.to_string().as_bytes(), u64::MAX).unwrap();
                assert_eq!((&read, read.check()), (&right, Ok(())), "{more} at {place:?}");
                assert_eq!(serde_json::to_value(&read).unwrap(), report(), "{more} at {place:?}");
            }
        }
        // Its bounds hold beside such a field, too.
        let mut newer = report();
        (newer["more"], newer["version"]) = (json!(1), json!(long));
        assert!(serde_json::from_value::<AgentReport>(newer).unwrap().check().is_err());
    }

    #[test]
    fn only_an_agent_that_has_ended_says_so() {
        let mut stopped = report();
        stopped["stopped"] = json!(true);
        let read: AgentReport = serde_json::from_value(stopped.clone()).unwrap();
        assert_eq!((read.stopped, serde_json::to_value(&read).unwrap()), (true, stopped));
        let running = AgentReport { stopped: false, ..read.clone() };
        assert_eq!(serde_json::to_value(&running).unwrap(), report(), "an older registry takes it");
        for (silent, report, gone) in [(false, &running, false), (true, &running, true), (false, &read, true)] {
            let info = AgentInfo { name: "gpu-1".parse().unwrap(), seen_at: 1, silent, label: None, report: report.clone() };
            assert_eq!(info.is_gone(), gone, "{info:?}");
        }
    }

    #[test]
    fn an_agent_is_silent_after_three_of_its_intervals() {
        let report: AgentReport = serde_json::from_value(report()).unwrap();
        assert!(!report.is_silent(1000, 91_000) && report.is_silent(1000, 91_001));
        assert!(!report.is_silent(1000, 0), "clocks may differ");
    }
}
