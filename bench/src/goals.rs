//! The goals, as data, and whether measurements meet them.
//!
//! Goals are ratios of measurements of one run wherever a peer or the [limit](crate::limit) gives
//! the measure, since seconds differ from machine to machine. On cores that are shared, wall time
//! depends on what else runs; processor time of client and servers does so less.

use crate::meter::{Sample, Step};
use crate::report::{Report, Spread};
use serde::Serialize;
use std::fmt::Write as _;

/// A goal.
pub struct Goal {
    /// What is bounded.
    what: &'static str,
    /// The unit of the bound.
    unit: &'static str,
    /// The places in which it holds; none if it does not depend on one.
    places: &'static [&'static str],
    /// The contenders that must meet it; none if the goal is not about contenders.
    contenders: &'static [&'static str],
    bound: Bound,
    measure: Measure,
}

#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// How the bounded number is found.
enum Measure {
    /// Processor time of a step, over that of another contender's step in the same round.
    Processor(Step, Other),
    /// Wall time of a step, over that of another contender's step in the same round.
    Time(Step, Other),
    /// Wall time of another contender's step in the same round, over that of this step.
    Speed(Step, Other),
    /// Bytes that the push of a fork moves, over 1.02 × its new bytes + 128 KiB.
    ForkBytes,
    /// Requests of a step.
    Requests(Step),
    /// Raw bytes over the bytes that the registry keeps.
    Stored,
    /// A number that another command finds.
    Fact(Fact),
    /// Nothing in this program finds it; the reason says what does, if anything.
    Elsewhere(&'static str),
}

/// A step of a contender.
type Other = (&'static str, Step);

/// Stands for the contender that is graded.
const ITSELF: &str = "itself";

/// A number that a command other than `run` finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// GB/s that the codec `bf16-bitmaps` encodes with AVX-512, one core.
    HotEncode,
    /// GB/s that it decodes.
    HotDecode,
    /// Raw bytes over its bytes.
    HotRatio,
    /// Raw bytes over those of `bf16-huffman`.
    ColdRatio,
    /// Digests a second that `missing` answers on SQLite, the slower of having and lacking.
    Missing,
    /// The same on PostgreSQL.
    MissingPostgres,
    /// The time to commit the 12th fork of an agent of 380,000 tokens over that for a small agent.
    TwelfthFork,
    /// Objects a second that a collection deletes on SQLite, in the slowest store.
    Swept,
    /// Milliseconds for statistics of 1,000 forks.
    Statistics,
    /// Milliseconds for a fork of such an agent into 12.
    Forks,
    /// Milliseconds for the slowest page of a registry with 1,000 forks, to its last byte.
    Ui,
    /// Milliseconds for a match among 10⁶ prefixes, the slower of hit and miss.
    Match,
    /// CPU-seconds of the client for an unchanged push of 200,000 pages.
    UnchangedPush,
    /// The time of verify, push or pull of 200,000 pages over that of 40,000, the worst of them.
    Growth,
    /// Throughput of 16 pushes and 16 pulls at once over that of one client that moves as much.
    TogetherTotal,
    /// The smallest share of one of these pushes or pulls over the largest one.
    TogetherShare,
    /// Peak memory of the registry in MiB with 16 pushes and 4 statistics of 1,000 forks at once.
    RegistryMemory,
    /// Peak memory of the client in MiB with 200,000 pages, the worst step.
    ClientMemory,
}

impl Fact {
    fn command(self) -> &'static str {
        match self {
            Self::HotEncode | Self::HotDecode => "pf-bench codecs measures it, with AVX-512",
            Self::HotRatio | Self::ColdRatio => "pf-bench codecs measures it",
            Self::Missing | Self::TwelfthFork => "pf-bench store measures it",
            Self::MissingPostgres => "pf-bench store --postgres measures it",
            Self::Swept => "pf-bench gc measures it",
            Self::Ui => "pf-bench ui measures it",
            Self::Statistics | Self::Forks | Self::Match => "pf-bench requests measures it",
            Self::TogetherTotal | Self::TogetherShare | Self::RegistryMemory => "pf-bench company measures it",
            Self::UnchangedPush | Self::Growth | Self::ClientMemory => "pf-bench pages measures it",
        }
    }
}

use Bound::{AtLeast, AtMost};

const BOTH: &[&str] = &["disk", "tmpfs"];
const DISK: &[&str] = &["disk"];
const MEMORY: &[&str] = &["tmpfs"];
const NONE: &[&str] = &[];
/// `pf` with each setting of `--compression`.
const PF: &[&str] = &["pf-off", "pf-hot", "pf-cold"];
const GPU: &str = "bench/gpu/run prints it, on a GPU";

const fn goal(what: &'static str, places: &'static [&'static str], bound: Bound, unit: &'static str, measure: Measure) -> Goal {
    Goal { what, unit, places, contenders: PF, bound, measure }
}

const fn stored(contenders: &'static [&'static str], bound: Bound) -> Goal {
    Goal { what: "bytes stored", unit: "raw bytes a byte", places: BOTH, contenders, bound, measure: Measure::Stored }
}

const fn elsewhere(what: &'static str, bound: Bound, unit: &'static str, reason: &'static str) -> Goal {
    Goal { what, unit, places: NONE, contenders: NONE, bound, measure: Measure::Elsewhere(reason) }
}

const fn fact(what: &'static str, bound: Bound, unit: &'static str, fact: Fact) -> Goal {
    Goal { what, unit, places: NONE, contenders: NONE, bound, measure: Measure::Fact(fact) }
}

/// The goals of `docs/performance.md`, in its order.
pub const GOALS: &[Goal] = &[
    goal("push", BOTH, AtMost(1.25), "× the limit's CPU", Measure::Processor(Step::Push, ("limit", Step::Push))),
    goal("pull into a store", BOTH, AtMost(1.3), "× the limit's CPU", Measure::Processor(Step::PullStore, ("limit", Step::PullStore))),
    // Where the limit writes packs: files cost more on a file system that looks for inodes.
    goal("pull into a directory", DISK, AtMost(2.0), "× the limit's CPU", Measure::Processor(Step::PullDir, ("limit", Step::PullStore))),
    goal("pull into a directory", MEMORY, AtMost(1.3), "× the limit's CPU", Measure::Processor(Step::PullDir, ("limit", Step::PullStore))),
    goal("get into memory, verified", MEMORY, AtMost(1.1), "× Redis' time", Measure::Time(Step::GetVerified, ("redis", Step::GetVerified))),
    goal(
        "get into memory, verified",
        MEMORY,
        AtMost(1.0),
        "× Mooncake's time",
        Measure::Time(Step::GetVerified, ("mooncake", Step::GetVerified)),
    ),
    goal("push of a fork, 1 % new", BOTH, AtMost(0.03), "× the full push's CPU", Measure::Processor(Step::PushFork, (ITSELF, Step::Push))),
    goal("push of a fork, 1 % new", BOTH, AtMost(1.0), "× (1.02 × its new bytes + 128 KiB)", Measure::ForkBytes),
    goal("push of a fork, 1 % new", BOTH, AtMost(6.0), "requests", Measure::Requests(Step::PushFork)),
    fact("unchanged push of 200,000 pages", AtMost(0.3), "CPU-s", Fact::UnchangedPush),
    elsewhere("16 clients push the same snapshot", AtMost(1.3), "× its bytes", "the test herd::long demands it"),
    // Equal times differ a little by chance.
    fact("commit of the 12th fork of 380,000 tokens", AtMost(1.1), "× the time for a small one", Fact::TwelfthFork),
    goal("push", BOTH, AtLeast(8.0), "× docker-registry's speed", Measure::Speed(Step::Push, ("docker-registry", Step::Push))),
    goal(
        "pull into a directory",
        BOTH,
        AtLeast(8.0),
        "× docker-registry's speed",
        Measure::Speed(Step::PullDir, ("docker-registry", Step::PullDir)),
    ),
    goal("push", BOTH, AtLeast(3.0), "× restic's speed", Measure::Speed(Step::Push, ("restic", Step::Push))),
    goal("pull into a directory", BOTH, AtLeast(3.0), "× restic's speed", Measure::Speed(Step::PullDir, ("restic", Step::PullDir))),
    goal("push", BOTH, AtLeast(1.0), "× SeaweedFS' speed", Measure::Speed(Step::Push, ("seaweedfs", Step::Push))),
    goal("pull into a directory", BOTH, AtLeast(1.0), "× SeaweedFS' speed", Measure::Speed(Step::PullDir, ("seaweedfs", Step::PullDir))),
    goal("push", BOTH, AtLeast(1.0), "× oras' speed", Measure::Speed(Step::Push, ("oras", Step::Push))),
    goal("pull into a directory", BOTH, AtLeast(1.0), "× oras' speed", Measure::Speed(Step::PullDir, ("oras", Step::PullDir))),
    goal("push", MEMORY, AtMost(1.0), "× Mooncake's time", Measure::Time(Step::Push, ("mooncake", Step::Push))),
    stored(&["pf-hot"], AtLeast(1.37)),
    stored(&["pf-cold"], AtLeast(1.45)),
    fact("codec bf16-bitmaps (hot)", AtLeast(1.37), "raw bytes a byte", Fact::HotRatio),
    fact("codec bf16-huffman (cold)", AtLeast(1.45), "raw bytes a byte", Fact::ColdRatio),
    fact("codec bf16-bitmaps, encode", AtLeast(4.0), "GB/s a core", Fact::HotEncode),
    fact("codec bf16-bitmaps, decode", AtLeast(10.0), "GB/s a core", Fact::HotDecode),
    fact("missing, SQLite", AtLeast(500_000.0), "digests/s", Fact::Missing),
    fact("missing, PostgreSQL", AtLeast(200_000.0), "digests/s", Fact::MissingPostgres),
    fact("statistics of 1,000 forks", AtMost(50.0), "ms", Fact::Statistics),
    fact("a fork into 12", AtMost(100.0), "ms", Fact::Forks),
    fact("a page of the registry, 1,000 forks", AtMost(100.0), "ms", Fact::Ui),
    fact("match among 10⁶ prefixes", AtMost(10.0), "ms", Fact::Match),
    fact("verify, push, pull: 200,000 pages after 40,000", AtMost(5.5), "× the time", Fact::Growth),
    fact("collection, SQLite", AtLeast(50_000.0), "objects/s", Fact::Swept),
    fact("16 pushes and 16 pulls at once, in total", AtLeast(0.9), "× the throughput of one client", Fact::TogetherTotal),
    fact("16 pushes and 16 pulls at once, the smallest share", AtLeast(0.5), "× the largest share", Fact::TogetherShare),
    elsewhere("a client beside 500 slow ones", AtMost(2.0), "× its time alone", "the test slow::long demands it"),
    fact("registry, 16 pushes and 4 statistics", AtMost(256.0), "MiB", Fact::RegistryMemory),
    fact("client, 200,000 pages", AtMost(256.0), "MiB", Fact::ClientMemory),
    elsewhere(
        "vLLM with an idle connector",
        AtMost(1.02),
        "× the time between tokens",
        "capture-agent/connectors/real-engine latency prints it",
    ),
    elsewhere("vLLM during a capture", AtMost(1.05), "× the time between tokens", "capture-agent/connectors/real-engine latency prints it"),
    elsewhere("SHA-256 of resident pages on an H200", AtLeast(400.0), "GB/s", GPU),
    elsewhere("capture of 13.9 GB on an H200, 1 % new", AtLeast(0.8), "of the bandwidth of copies to the host", GPU),
];

/// Whether a goal is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grade {
    /// The median keeps the bound.
    Met,
    /// It does not.
    Missed,
    /// There is no measurement.
    NotMeasured,
}

/// A goal in one place, graded.
#[derive(Clone, Debug, Serialize)]
pub struct Graded {
    goal: &'static str,
    contender: Option<&'static str>,
    place: Option<&'static str>,
    at_most: Option<f64>,
    at_least: Option<f64>,
    unit: &'static str,
    found: Option<Spread>,
    grade: Grade,
    /// Why it was not measured.
    why: Option<String>,
}

/// Grades all goals by the measurements of a run.
pub fn of_run(report: &Report) -> Vec<Graded> {
    let ran = |contender: &&&str| report.samples.iter().any(|sample| sample.contender == **contender);
    let mut graded = Vec::new();
    for goal in GOALS {
        if goal.contenders.is_empty() {
            graded.push(goal.grade(None, None, goal.measure.of_run(report, "", "")));
        }
        // Of several settings, those that were left out of the run are not worth a line each.
        let measured: Vec<&str> = goal.contenders.iter().filter(ran).copied().collect();
        let contenders = if measured.is_empty() { goal.contenders.to_vec() } else { measured };
        for place in goal.places {
            for contender in &contenders {
                graded.push(goal.grade(Some(*contender), Some(*place), goal.measure.of_run(report, contender, place)));
            }
        }
    }
    graded
}

/// Grades the goals that these numbers decide.
pub fn of_facts(facts: &[(Fact, f64)]) -> Vec<Graded> {
    let graded = GOALS.iter().filter_map(|goal| {
        let Measure::Fact(fact) = goal.measure else { return None };
        let value = facts.iter().find(|(found, _)| *found == fact)?.1;
        Some(goal.grade(None, None, Spread::of([value]).ok_or_else(String::new)))
    });
    graded.collect()
}

impl Goal {
    fn grade(&self, contender: Option<&'static str>, place: Option<&'static str>, found: Result<Spread, String>) -> Graded {
        let (at_most, at_least) = match self.bound {
            AtMost(bound) => (Some(bound), None),
            AtLeast(bound) => (None, Some(bound)),
        };
        let (found, why) = match found {
            Ok(found) => (Some(found), None),
            Err(why) => (None, Some(why)),
        };
        let grade = match found {
            None => Grade::NotMeasured,
            Some(found) if at_most.is_some_and(|bound| found.median > bound) => Grade::Missed,
            Some(found) if at_least.is_some_and(|bound| found.median < bound) => Grade::Missed,
            Some(_) => Grade::Met,
        };
        Graded { goal: self.what, contender, place, at_most, at_least, unit: self.unit, found, grade, why }
    }
}

impl Measure {
    fn of_run(&self, report: &Report, contender: &str, place: &str) -> Result<Spread, String> {
        let pairs = |step: Step, (name, other): Other, ratio: fn(&Sample, &Sample) -> f64| {
            let name = if name == ITSELF { contender } else { name };
            let own = samples(report, place, contender, step)?;
            let others = samples(report, place, name, other)?;
            let in_round = |own: &&Sample| others.iter().find(|other| other.round == own.round).map(|other| ratio(own, other));
            Spread::of(own.iter().filter_map(in_round)).ok_or_else(|| format!("{name} and {contender} had no round in common"))
        };
        let each = |step: Step, value: &dyn Fn(&Sample) -> Option<f64>| {
            let own = samples(report, place, contender, step)?;
            Spread::of(own.into_iter().filter_map(value)).ok_or_else(|| format!("{contender} did not report it"))
        };
        match *self {
            Self::Processor(step, other) => pairs(step, other, |own, other| own.processor_seconds / other.processor_seconds.max(0.01)),
            Self::Time(step, other) => pairs(step, other, |own, other| own.seconds / other.seconds),
            Self::Speed(step, other) => pairs(step, other, |own, other| other.seconds / own.seconds),
            Self::ForkBytes => {
                let allowed = report.new_bytes as f64 * 1.02 + f64::from(128 << 10);
                each(Step::PushFork, &|sample| sample.reported.bytes_moved.map(|bytes| bytes as f64 / allowed))
            }
            Self::Requests(step) => each(step, &|sample| sample.reported.round_trips.map(|count| count as f64)),
            Self::Stored => each(Step::Push, &Sample::raw_of_stored),
            Self::Fact(fact) => Err(fact.command().to_owned()),
            Self::Elsewhere(reason) => Err(reason.to_owned()),
        }
    }
}

/// The samples of a contender's step, or why there are none.
fn samples<'a>(report: &'a Report, place: &str, contender: &str, step: Step) -> Result<Vec<&'a Sample>, String> {
    let samples = report.of(place, contender, step);
    if !samples.is_empty() {
        return Ok(samples);
    }
    if let Some((_, why)) = report.missing.iter().find(|(name, _)| *name == contender) {
        return Err(why.clone());
    }
    let has = |found: &dyn Fn(&Sample) -> bool| report.samples.iter().any(|sample| sample.contender == contender && found(sample));
    Err(if !has(&|_| true) {
        format!("{contender} did not run")
    } else if !has(&|sample| sample.place == place) {
        format!("{contender} did not run on {place}")
    } else {
        format!("{contender} has no step \"{}\" yet", step.name())
    })
}

/// A Markdown table.
pub fn render(graded: &[Graded]) -> String {
    let mut out = String::from("| goal | contender | place | bound | found (min–max) | |\n|---|---|---|---|---|---|\n");
    for graded in graded {
        let bound = match (graded.at_most, graded.at_least) {
            (Some(bound), _) => format!("≤ {bound} {}", graded.unit),
            (_, Some(bound)) => format!("≥ {bound} {}", graded.unit),
            _ => String::new(),
        };
        let short = |value: f64| if value < 1000.0 { format!("{value:.3}") } else { format!("{value:.0}") };
        let found = graded.found.map_or_else(|| "–".into(), |s| format!("{} ({}–{})", short(s.median), short(s.min), short(s.max)));
        let grade = match graded.grade {
            Grade::Met => "met".to_owned(),
            Grade::Missed => "**missed**".to_owned(),
            Grade::NotMeasured => format!("not measured: {}", graded.why.as_deref().unwrap_or("no reason given")),
        };
        let (contender, place) = (graded.contender.unwrap_or("–"), graded.place.unwrap_or("–"));
        let line = format!("| {} | {contender} | {place} | {bound} | {found} | {grade} |\n", graded.goal);
        out.write_str(&line).unwrap_or_default();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender;
    use crate::machine::describe;
    use crate::meter::Reported;

    fn sample(place: &str, contender: &'static str, step: Step, round: usize, seconds: f64) -> Sample {
        Sample {
            place: place.into(),
            contender,
            step,
            round,
            raw_bytes: 1_370_000,
            seconds,
            sync_seconds: 0.0,
            processor_seconds: 2.0 * seconds,
            others_seconds: 0.0,
            server_memory: None,
            stored_bytes: Some(1_000_000),
            reported: Reported { bytes_moved: Some(1_000_000), round_trips: Some(7), client_memory: None },
        }
    }

    fn graded(samples: Vec<Sample>) -> Vec<Graded> {
        let missing = vec![("restic", "restic is not installed: apt-get install restic".to_owned())];
        of_run(&Report {
            date: None,
            machine: describe(&[]),
            pages: 1,
            rounds: 3,
            notes: Vec::new(),
            missing,
            new_bytes: 1_000_000,
            samples,
        })
    }

    #[track_caller]
    fn check(all: &[Graded], goal: &str, of: Option<(&str, &str)>, unit: &str, grade: Grade, said: &str) {
        let is_meant = |g: &&Graded| g.goal == goal && g.contender.zip(g.place) == of && g.unit == unit;
        let found = all.iter().find(is_meant).expect("no such goal");
        let line = render(std::slice::from_ref(found));
        assert!(found.grade == grade && line.contains(said), "{line}");
    }

    #[test]
    fn medians_of_the_same_rounds_decide_and_the_rest_says_why_not() {
        let mut samples = Vec::new();
        for (round, (own, limit)) in [(1.0, 0.9), (9.0, 8.0), (1.2, 1.0)].into_iter().enumerate() {
            samples.push(sample("disk", "pf-hot", Step::Push, round, own));
            samples.push(sample("disk", "pf-cold", Step::Push, round, 2.0 * own));
            samples.push(sample("disk", "limit", Step::Push, round, limit));
            samples.push(sample("disk", "docker-registry", Step::Push, round, 4.0 * own));
            samples.push(sample("disk", "pf-hot", Step::PushFork, round, own / 50.0));
        }
        // Not the same round: it decides nothing.
        samples.push(sample("disk", "limit", Step::Push, 3, 0.001));
        let all = graded(samples);
        let (hot, cold) = (Some(("pf-hot", "disk")), Some(("pf-cold", "disk")));
        let in_memory = Some(("pf-hot", "tmpfs"));
        check(&all, "push", hot, "× the limit's CPU", Grade::Met, "| 1.125 (1.111–1.200) | met |");
        check(&all, "push", cold, "× the limit's CPU", Grade::Missed, "| 2.250 (2.222–2.400) | **missed** |");
        check(
            &all,
            "push",
            hot,
            "× docker-registry's speed",
            Grade::Missed,
            "≥ 8 × docker-registry's speed | 4.000 (4.000–4.000) | **missed**",
        );
        check(&all, "push", in_memory, "× the limit's CPU", Grade::NotMeasured, "pf-hot did not run on tmpfs");
        check(&all, "push", hot, "× restic's speed", Grade::NotMeasured, "apt-get install restic");
        check(&all, "push", hot, "× SeaweedFS' speed", Grade::NotMeasured, "seaweedfs did not run");
        check(&all, "pull into a store", hot, "× the limit's CPU", Grade::NotMeasured, "pf-hot has no step \"pull into a store\" yet");
        check(&all, "push of a fork, 1 % new", hot, "× the full push's CPU", Grade::Met, "| 0.020 (0.020–0.020) | met |");
        check(&all, "push of a fork, 1 % new", hot, "requests", Grade::Missed, "≤ 6 requests | 7.000");
        check(&all, "push of a fork, 1 % new", hot, "× (1.02 × its new bytes + 128 KiB)", Grade::Met, "| 0.869");
        check(&all, "bytes stored", hot, "raw bytes a byte", Grade::Met, "| 1.370");
        check(&all, "bytes stored", cold, "raw bytes a byte", Grade::Missed, "≥ 1.45");
        check(&all, "missing, SQLite", None, "digests/s", Grade::NotMeasured, "pf-bench store measures it");
        assert!(all.iter().all(|graded| graded.contender != Some("pf-off")), "it did not run, and others did");
        let none = graded(Vec::new());
        check(&none, "push", Some(("pf-off", "disk")), "× the limit's CPU", Grade::NotMeasured, "pf-off did not run");
    }

    #[test]
    fn facts_decide_their_goals_and_no_others() {
        let all = of_facts(&[(Fact::HotEncode, 3.9), (Fact::Match, 9.0)]);
        assert_eq!(all.len(), 2);
        check(&all, "codec bf16-bitmaps, encode", None, "GB/s a core", Grade::Missed, "**missed**");
        check(&all, "match among 10⁶ prefixes", None, "ms", Grade::Met, "met");
    }

    #[test]
    fn goals_name_contenders_that_there_are() {
        let there_is = |name: &str| contender::names().contains(&name);
        for goal in GOALS {
            assert!(goal.contenders.iter().all(|name| there_is(name)), "{}", goal.what);
            let (Measure::Processor(_, other) | Measure::Time(_, other) | Measure::Speed(_, other)) = &goal.measure else { continue };
            assert!(other.0 == ITSELF || there_is(other.0), "{}", goal.what);
        }
    }

    #[test]
    fn a_graded_goal_is_json_without_what_it_lacks() {
        let all = of_facts(&[(Fact::Missing, 400_000.0)]);
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!(json[0]["grade"], "missed");
        assert_eq!(json[0]["at_least"], 500_000.0);
        assert_eq!(json[0]["found"], serde_json::json!([400_000.0, 400_000.0, 400_000.0]));
    }
}
