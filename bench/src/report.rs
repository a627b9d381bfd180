//! The results of a run: medians with their spread, and ratios of results of the same run.

pub mod json;
pub mod table;

use crate::Result;
use crate::machine::Machine;
use crate::meter::{Sample, Step};
use serde::Serialize;
use std::path::Path;

/// The results of a run.
pub struct Report {
    /// The date, if it was given.
    pub date: Option<String>,
    /// The machine.
    pub machine: Machine,
    /// Pages of the workload.
    pub pages: usize,
    /// Rounds.
    pub rounds: usize,
    /// Remarks for the reader.
    pub notes: Vec<String>,
    /// Everything measured.
    pub samples: Vec<Sample>,
}

/// Median with minimum and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(into = "[f64; 3]")]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl From<Spread> for [f64; 3] {
    fn from(spread: Spread) -> Self {
        [spread.min, spread.median, spread.max]
    }
}

impl Spread {
    /// The spread of `values`; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) { f64::midpoint(values[middle - 1], values[middle]) } else { values[middle] };
        Some(Self { median, min, max })
    }
}

/// A row of a table: the measurements of one step of one contender in one place.
pub struct Row<'a> {
    /// `disk` or `tmpfs`.
    pub place: &'a str,
    /// Name of the contender.
    pub contender: &'static str,
    /// The step.
    pub step: Step,
    /// Its samples, by round.
    pub samples: Vec<&'a Sample>,
    /// Wall time.
    pub seconds: Spread,
    /// Wall time relative to that of the contender `floor` in the same round.
    pub of_floor: Option<Spread>,
    /// Processor time relative to that of the contender `floor` in the same round. Other processes
    /// on the machine change it less than wall time.
    pub processor_of_floor: Option<Spread>,
    /// Speed relative to that of `docker-registry` in the same round.
    pub of_docker: Option<Spread>,
    /// The resource that the step waits for.
    pub limit: &'static str,
}

/// A row in a file of results.
#[derive(Serialize)]
struct Case<'a> {
    place: &'a str,
    step: Step,
    contender: &'static str,
    raw_bytes: u64,
    seconds: Spread,
    /// Time of a `syncfs` after the step.
    sync_seconds: Option<Spread>,
    /// Processor time of client and server.
    cpu_seconds: Option<Spread>,
    /// Processor time of everything else on the machine.
    others_cpu_seconds: Option<Spread>,
    of_floor: Option<Spread>,
    cpu_of_floor: Option<Spread>,
    of_docker_registry: Option<Spread>,
    limit: &'static str,
    bytes_moved: Option<f64>,
    stored_bytes: Option<f64>,
    round_trips: Option<f64>,
    client_memory: Option<f64>,
    server_memory: Option<f64>,
}

impl Row<'_> {
    fn case(&self) -> Case<'_> {
        let spread = |value: fn(&Sample) -> f64| Spread::of(self.samples.iter().map(|s| value(s)));
        let median = |value: fn(&Sample) -> Option<u64>| {
            Spread::of(self.samples.iter().filter_map(|s| value(s)).map(|v| v as f64)).map(|s| s.median)
        };
        Case {
            place: self.place,
            step: self.step,
            contender: self.contender,
            raw_bytes: self.samples.first().map_or(0, |s| s.raw_bytes),
            seconds: self.seconds,
            sync_seconds: spread(|s| s.sync_seconds),
            cpu_seconds: spread(|s| s.processor_seconds),
            others_cpu_seconds: spread(|s| s.others_seconds),
            of_floor: self.of_floor,
            cpu_of_floor: self.processor_of_floor,
            of_docker_registry: self.of_docker,
            limit: self.limit,
            bytes_moved: median(|s| s.reported.bytes_moved),
            stored_bytes: median(|s| s.reported.stored_bytes),
            round_trips: median(|s| s.reported.round_trips),
            client_memory: median(|s| s.reported.client_memory),
            server_memory: median(|s| s.reported.server_memory),
        }
    }
}

impl Report {
    /// Writes medians and spreads of everything.
    pub fn write(&self, path: &Path) -> Result<()> {
        let rows = self.rows();
        let cases: Vec<Case<'_>> = rows.iter().map(Row::case).collect();
        let Self { date, machine, pages, rounds, notes, .. } = self;
        let result = serde_json::json!({
            "date": date, "machine": machine, "pages": pages, "rounds": rounds, "notes": notes, "cases": cases,
        });
        json::write(path, &result)
    }

    /// The places, in the order of their first samples.
    pub fn places(&self) -> Vec<&str> {
        let mut places: Vec<&str> = Vec::new();
        for sample in &self.samples {
            if !places.contains(&sample.place.as_str()) {
                places.push(&sample.place);
            }
        }
        places
    }

    /// Rows by place, step and contender.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        for place in self.places() {
            for step in Step::ALL {
                for contender in ["write-only", "floor", "pf-off", "pf-hot", "pf-cold", "docker-registry"] {
                    rows.extend(self.row(place, step, contender));
                }
            }
        }
        rows
    }

    fn row<'a>(&'a self, place: &'a str, step: Step, contender: &'static str) -> Option<Row<'a>> {
        let samples = self.of(place, contender, step);
        let seconds = Spread::of(samples.iter().map(|s| s.seconds))?;
        let floor = self.of(place, "floor", if step == Step::PullDir { Step::PullStore } else { step });
        let docker = self.of(place, "docker-registry", if step == Step::PullStore { Step::PullDir } else { step });
        let rounds = |others: &[&Sample], ratio: fn(&Sample, &Sample) -> f64| {
            let pair = |s: &&Sample| others.iter().find(|o| o.round == s.round).map(|o| ratio(s, o));
            Spread::of(samples.iter().filter_map(pair))
        };
        let of_floor = rounds(&floor, |own, floor| own.seconds / floor.seconds);
        let processor_of_floor = rounds(&floor, |own, floor| own.processor_seconds / floor.processor_seconds.max(0.01));
        let of_docker = rounds(&docker, |own, docker| docker.seconds / own.seconds);
        let limit = self.limit(place, step, &samples);
        Some(Row { place, contender, step, samples, seconds, of_floor, processor_of_floor, of_docker, limit })
    }

    fn of(&self, place: &str, contender: &str, step: Step) -> Vec<&Sample> {
        self.samples.iter().filter(|s| s.place == place && s.contender == contender && s.step == step).collect()
    }

    /// The resource that limited the step: processors (nearly all were in use), the disk (writing
    /// alone takes nearly as long), or neither.
    fn limit(&self, place: &str, step: Step, samples: &[&Sample]) -> &'static str {
        let median = |f: fn(&Sample) -> f64| Spread::of(samples.iter().map(|s| f(s))).map_or(0.0, |s| s.median);
        let (wall, own, others) = (median(|s| s.seconds), median(|s| s.processor_seconds), median(|s| s.others_seconds));
        let alone = Spread::of(self.of(place, "write-only", Step::Push).iter().map(|s| s.seconds)).map(|s| s.median);
        let all = wall * self.machine.cores as f64;
        let everything = matches!(step, Step::Push | Step::PullStore | Step::PullDir);
        if own > 0.8 * all {
            "CPU"
        } else if own + others > 0.85 * all {
            "CPU, shared"
        } else if place != "tmpfs" && everything && alone.is_some_and(|alone| wall < 1.3 * alone) {
            "disk"
        } else if place != "tmpfs" && everything {
            "CPU and disk in turn"
        } else {
            "waits"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_its_median_between_its_ends() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }
}
