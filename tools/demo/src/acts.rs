//! The acts of the demo. Each shows one promise, and fails if the promise is broken.

use crate::damage::turn_a_bit;
use crate::engine::{Event, Step};
use crate::host::{Host, Programs};
use crate::narrator::Narrator;
use crate::report::{of_restore, of_snapshot};
use crate::script::{Direction, Script};
use crate::stage::Stage;
use pfr_client::cli::Failure;
use pfr_client::cli::output::human::{bytes, count, duration, short_digests};
use pfr_client::cli::output::paint::Style;
use pfr_client::cli::{print_engines, print_lineage, print_stats};
use pfr_client::{Remote, RemoteOptions};
use pfr_schema::agent::{Push, PushState, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest};
use pfr_schema::api::Lineage;
use pfr_schema::{ErrorCode, RepositoryName};
use std::time::Duration;
use tokio::time::{Instant, interval};

const REPOSITORY: &str = "agent/main";
/// The tag of the snapshot in mid-sentence.
const SENTENCE: &str = "sentence";
/// Tokens after which the model is stopped, whatever else happens.
const LONGEST: u64 = 1000;
/// How long pushes may take.
const PUSHES: Duration = Duration::from_secs(60);
/// The fork that host C takes over.
const TAKEN: usize = 2;

/// A captured sequence of host A, and what it said after the capture.
struct Captured {
    report: SnapshotReport,
    after: Vec<Step>,
}

/// The demo and what it needs.
pub struct Play<'a> {
    pub narrator: &'a mut Narrator,
    pub stage: &'a Stage,
    pub script: &'a Script,
    pub programs: &'a Programs,
    pub url: &'a str,
    pub quiet: bool,
}

impl Play<'_> {
    /// Every act.
    pub async fn all(&mut self) -> Result<(), Failure> {
        self.narrator.step("Host A: an engine, and the agent that captures its state")?;
        let mut a = self.host('a').await?;
        self.engines(&a).await?;
        let sentence = self.capture(&mut a).await?;
        let forks = self.fork(&mut a, &sentence.report).await?;
        self.look_back(&a).await?;
        let b = self.resume(&sentence).await?;
        let c = self.take_over(&mut a, &forks[TAKEN]).await?;
        let c = self.damage(c).await?;
        for host in [a, b, c] {
            host.stop().await?;
        }
        Ok(())
    }

    async fn host(&mut self, letter: char) -> Result<Host, Failure> {
        Host::start(letter, self.programs, self.stage, self.script, self.url, self.narrator, self.quiet).await
    }

    async fn engines(&mut self, host: &Host) -> Result<(), Failure> {
        self.narrator.command(&host.prompt, "pf engines")?;
        let answer = host.client.engines().await?;
        self.narrator.show(|out| print_engines(out, &answer))?;
        self.narrator.also(
            "1 rank: the model is not split over GPUs; a cache group is a set of layers with one block table; the KV memory is mapped \
             into the agent, which reads it in place",
        )
    }

    /// The model generates text, is captured meanwhile, and goes on.
    async fn capture(&mut self, host: &mut Host) -> Result<Captured, Failure> {
        self.narrator.step("The engine is captured in mid-sentence, and goes on")?;
        self.narrator.also(&format!("“{}”", self.script.question))?;
        let (sequence, first) = host.engine.open(&self.script.prompt).await?;
        let first = self.first(host, &sequence, self.script.prompt.len(), first).await?;
        self.narrator.begin("")?;
        self.narrator.bit(&first, Style::Plain)?;
        host.engine.generate(&sequence, LONGEST, self.pace()).await?;
        let (mut steps, mut work, mut stopping) = (Vec::new(), None, false);
        loop {
            match host.engine.event().await? {
                Event::Token(step) => {
                    self.narrator.bit(&self.piece(&step), Style::Plain)?;
                    steps.push(step);
                }
                Event::Paused => self.narrator.mark("◆", Style::Cyan),
                Event::Generated => break,
                Event::Other(..) => {}
            }
            let said = steps.len() as u64;
            if work.is_none() && said == self.script.until_snapshot {
                let (client, engine) = (host.client.clone(), host.engine_name.clone());
                let request = request(&sequence, SENTENCE);
                work = Some(tokio::spawn(async move { client.snapshot(&engine, &request).await }));
            }
            if !stopping && said >= self.script.story && work.as_ref().is_some_and(tokio::task::JoinHandle::is_finished) {
                host.engine.hold(&sequence).await?;
                stopping = true;
            }
        }
        self.narrator.end()?;
        let work = work.ok_or_else(|| host.failed("the model fell silent before it was captured"))?;
        let report = work.await.map_err(|e| Failure::bug(e.to_string()))??;
        self.narrator.command(&host.prompt, &format!("pf snapshot {} {REPOSITORY}:{SENTENCE}", host.engine_name))?;
        self.narrator.also(&format!("taken at ◆, token {}, while the model went on", report.boundary))?;
        self.narrator.result_after(&of_snapshot(&report), report.total_seconds)?;
        let after: Vec<Step> = steps.into_iter().filter(|step| step.boundary > report.boundary).collect();
        expect(after.len() > 1, "the model should have gone on after it was captured")?;
        Ok(Captured { report, after })
    }

    /// Forks the sentence three times, each with another end.
    async fn fork(&mut self, host: &mut Host, sentence: &SnapshotReport) -> Result<Vec<Captured>, Failure> {
        self.narrator.step("Back to ◆ three times: each fork gets another instruction")?;
        let mut forks = Vec::new();
        for (i, direction) in self.script.directions.iter().enumerate() {
            if i > 0 {
                self.narrator.say("")?;
            }
            let restored = self.restore(host, SENTENCE, true).await?;
            let sequence = restored.sequence.ok_or_else(|| host.failed("the restored sequence has no name"))?;
            self.speak_to(host, &sequence, direction).await?;
            let tag = format!("fork-{}", i + 1);
            self.narrator.command(&host.prompt, &format!("pf snapshot {} {REPOSITORY}:{tag} --sequence {sequence}", host.engine_name))?;
            let report = host.client.snapshot(&host.engine_name, &request(&sequence, &tag)).await?;
            self.narrator.result_after(&of_snapshot(&report), report.total_seconds)?;
            expect(report.parent == Some(sentence.digest), "a fork's parent should be what it was restored from")?;
            expect(report.bytes_moved < report.bytes_resident, "a fork should have shared pages with its parent")?;
            forks.push(Captured { report, after: Vec::new() });
        }
        Ok(forks)
    }

    async fn speak_to(&mut self, host: &mut Host, sequence: &str, direction: &Direction) -> Result<(), Failure> {
        let before = host.engine.text(sequence).await?.len();
        let first = host.engine.append(sequence, &direction.appended).await?;
        let first = self.first(host, sequence, before + direction.appended.len(), first).await?;
        self.narrator.begin(&format!("“{}”", direction.title))?;
        self.narrator.bit(&first, Style::Plain)?;
        host.engine.generate(sequence, self.script.fork, self.pace()).await?;
        self.listen(host, |_, _| Style::Plain).await?;
        self.narrator.end()
    }

    async fn look_back(&mut self, host: &Host) -> Result<(), Failure> {
        self.narrator.step("The registry has all four snapshots; what each of them costs")?;
        self.narrator.command(&host.prompt, "pf pushes")?;
        let (deadline, mut ticks) = (Instant::now() + PUSHES, interval(Duration::from_millis(20)));
        let pushes = loop {
            ticks.tick().await;
            let pushes = host.client.pushes().await?.pushes;
            if pushes.iter().all(|push| push.state == PushState::Done) {
                break pushes;
            }
            let stuck = pushes.iter().find(|push| push.state == PushState::Failed || Instant::now() > deadline);
            if let Some(push) = stuck {
                return Err(host.failed(&format!(
                    "{} was not pushed: {}",
                    push.reference,
                    push.error.as_deref().unwrap_or("it takes too long")
                )));
            }
        };
        let sent = pushes.iter().map(|push| push.bytes_sent).sum();
        self.narrator.result(&format!("{} pushed in the background, {} sent", count(pushes.len() as u64, "snapshot"), bytes(sent)))?;

        let (remote, repository) = (Remote::new(self.url, RemoteOptions::default())?, REPOSITORY.parse::<RepositoryName>()?);
        self.narrator.command("$", &format!("pf log {REPOSITORY}"))?;
        let list = remote.snapshots(&repository, None, 100).await?;
        let lineage = Lineage { snapshots: list.snapshots, truncated: false };
        self.narrator.show(|out| print_lineage(out, &lineage))?;
        self.narrator.command("$", &format!("pf stats {REPOSITORY}"))?;
        let costs = remote.stats(Some(&repository)).await?;
        self.narrator.show(|out| print_stats(out, &costs))?;
        expect(costs.dedup_ratio > 1.0, "forks should have shared pages")
    }

    /// The sentence continues on a host that has never seen it.
    async fn resume(&mut self, sentence: &Captured) -> Result<Host, Failure> {
        self.narrator.step("Host B has an empty store: it pulls the snapshot, and the sentence goes on")?;
        let mut b = self.host('b').await?;
        let restored = self.restore(&mut b, SENTENCE, false).await?;
        expect(restored.bytes_pulled > 0, "an empty store should have had to pull")?;
        self.compare(&mut b, &restored, &sentence.after).await?;
        self.cost(&mut b, &restored).await?;
        Ok(b)
    }

    /// A fork moves to another host, and both say the same.
    async fn take_over(&mut self, a: &mut Host, fork: &Captured) -> Result<Host, Failure> {
        self.narrator.step("Host C takes over a fork, and says the same as host A")?;
        a.engine.generate(&fork.report.sequence, self.script.fork, Duration::ZERO).await?;
        let (mut after, mut ended) = (Vec::new(), false);
        loop {
            match a.engine.event().await? {
                // Tokens after the end of a story belong to another story.
                Event::Token(step) if ended || self.script.end == Some(&step.text) => ended = true,
                Event::Token(step) => after.push(step),
                Event::Generated => break,
                Event::Paused | Event::Other(..) => {}
            }
        }
        expect(!after.is_empty(), "the fork should have had more to say")?;
        let mut c = self.host('c').await?;
        let restored = self.restore(&mut c, &format!("fork-{}", TAKEN + 1), false).await?;
        self.compare(&mut c, &restored, &after).await?;
        Ok(c)
    }

    /// A wrong byte is found before it is used.
    async fn damage(&mut self, mut host: Host) -> Result<Host, Failure> {
        self.narrator.step("One bit flips on host C's disk: the restore is refused")?;
        let store = format!("{}/store", host.folder);
        let pack = turn_a_bit(&self.stage.at(&store))?;
        let pack = pack.strip_prefix(self.stage.root()).unwrap_or(&pack).display().to_string();
        self.narrator.also(&format!("the bit is in the middle of {pack}"))?;
        let before = host.engine.sequences().await?;
        let reference = format!("{REPOSITORY}:fork-{}", TAKEN + 1);
        self.narrator.command(&host.prompt, &format!("pf restore {reference} {} --local", host.engine_name))?;
        let request = RestoreRequest { reference, local: true, ..RestoreRequest::default() };
        let (code, refused) = match host.client.restore(&host.engine_name, &request).await {
            Ok(report) => {
                return Err(Failure::new(ErrorCode::CorruptStore, format!("a damaged page was restored as {:?}", report.sequence)));
            }
            Err(error) => (error.code(), Failure::from(error)),
        };
        let (4, Failure::Error { message, .. }) = (refused.exit(), &refused) else { return Err(refused) };
        self.narrator.refusal(&short_digests(message))?;
        expect(host.engine.sequences().await? == before, "a refused restore should have left no sequence")?;
        self.narrator.result(&format!("refused as {code}, exit code 4, as it should be: nothing of it runs"))?;
        let Some(sequence) = before.last() else { return Err(host.failed("the engine has lost its sequence")) };
        self.narrator.also("and the engine goes on:")?;
        self.narrator.begin_of(host.letter)?;
        self.narrator.mark("…", Style::Dim);
        host.engine.generate(sequence, self.script.fork / 2, self.pace()).await?;
        let steps = self.listen(&mut host, |_, _| Style::Plain).await?;
        self.narrator.end()?;
        expect(steps.len() as u64 == self.script.fork / 2, "the engine should have gone on")?;
        Ok(host)
    }

    // ---- properties

    /// Restores as the command does, and prints the result.
    async fn restore(&mut self, host: &mut Host, tag: &str, local: bool) -> Result<RestoreReport, Failure> {
        let request = RestoreRequest { reference: format!("{REPOSITORY}:{tag}"), local, ..RestoreRequest::default() };
        let flag = if local { " --local" } else { "" };
        self.narrator.command(&host.prompt, &format!("pf restore {} {}{flag}", request.reference, host.engine_name))?;
        let report = host.client.restore(&host.engine_name, &request).await?;
        self.narrator.result_after(&of_restore(&report), report.total_seconds)?;
        expect(report.oracle, "the logits of the first step should have been compared")?;
        Ok(report)
    }

    /// Continues a restored sequence, and compares it with the original.
    async fn compare(&mut self, host: &mut Host, restored: &RestoreReport, original: &[Step]) -> Result<(), Failure> {
        let sequence = named(host, restored)?;
        self.narrator.begin_of('A')?;
        self.narrator.mark("…", Style::Dim);
        for step in original {
            self.narrator.bit(&self.piece(step), Style::Dim)?;
        }
        self.narrator.end()?;
        self.narrator.begin_of(host.letter)?;
        self.narrator.mark("…", Style::Dim);
        host.engine.generate(sequence, original.len() as u64, self.pace()).await?;
        let steps = self.listen(host, |i, step| if original.get(i) == Some(step) { Style::Green } else { Style::Red }).await?;
        self.narrator.end()?;
        let same = steps.iter().zip(original).filter(|(here, there)| here == there).count();
        expect(same == original.len() && steps.len() == same, &format!("only {same} of {} tokens are equal", original.len()))?;
        self.narrator.result(&format!("equal: {same} of {same} tokens, and every bit of their logits"))
    }

    /// Prints the text of the model until it ends.
    async fn listen(&mut self, host: &mut Host, style: impl Fn(usize, &Step) -> Style) -> Result<Vec<Step>, Failure> {
        let mut steps = Vec::new();
        loop {
            match host.engine.event().await? {
                Event::Token(step) => {
                    self.narrator.bit(&self.piece(&step), style(steps.len(), &step))?;
                    steps.push(step);
                }
                Event::Generated => return Ok(steps),
                Event::Paused | Event::Other(..) => {}
            }
        }
    }

    /// Measures what the restore has saved: computes the same prefix again on this host.
    async fn cost(&mut self, host: &mut Host, restored: &RestoreReport) -> Result<(), Failure> {
        let sequence = named(host, restored)?.to_owned();
        let recomputed = host.engine.recompute(&sequence, restored.boundary).await?;
        let saved = recomputed.as_secs_f64() / restored.total_seconds.max(1e-6);
        let times = if saved >= 1.5 { format!(", {saved:.0} times as long") } else { String::new() };
        self.narrator.also(&format!(
            "without the snapshot host {} would have to compute these {} tokens again (prefill). Measured here: {} to compute them, \
             {} to restore them{times}",
            host.letter,
            restored.boundary,
            duration(recomputed),
            duration(Duration::try_from_secs_f64(restored.total_seconds).unwrap_or_default()),
        ))
    }

    /// The first token that was chosen after a prompt of `prompt` bytes, as it is shown.
    async fn first(&self, host: &mut Host, sequence: &str, prompt: usize, token: u32) -> Result<String, Failure> {
        if !self.script.is_text() {
            return Ok(token.to_string());
        }
        Ok(host.engine.text(sequence).await?.get(prompt..).unwrap_or_default().to_owned())
    }

    /// A token as it is shown.
    fn piece(&self, step: &Step) -> String {
        if self.script.is_text() { step.text.clone() } else { format!(" {}", step.token) }
    }

    /// Time from one token to the next: slow enough to read if the output is a terminal.
    fn pace(&self) -> Duration {
        Duration::from_millis(if self.narrator.is_watched() { 28 } else { 2 })
    }
}

fn request(sequence: &str, tag: &str) -> SnapshotRequest {
    SnapshotRequest {
        sequence: Some(sequence.to_owned()),
        reference: format!("{REPOSITORY}:{tag}"),
        push: Push::Background,
        ..SnapshotRequest::default()
    }
}

/// The sequence that a restore made.
fn named<'a>(host: &Host, restored: &'a RestoreReport) -> Result<&'a str, Failure> {
    restored.sequence.as_deref().ok_or_else(|| host.failed("the restored sequence has no name"))
}

/// A promise that the demo shows.
fn expect(kept: bool, otherwise: &str) -> Result<(), Failure> {
    if kept { Ok(()) } else { Err(Failure::bug(otherwise)) }
}
