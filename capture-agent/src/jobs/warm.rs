//! Warm: snapshots are pulled ahead of the restores that need them, behind the restores that pull
//! now.
//!
//! ```text
//! references, patterns ─▶ look up ─▶ fits the engine? ─▶ what does the store lack? ─▶ budget ─▶ pull, one by one ─▶ pin for a time
//! ```

use super::handle::{Handle, Tries};
use super::wanted::{Found, Wanted, room};
use crate::Agent;
use crate::error::{Error, Result};
use crate::metrics as names;
use crate::rate::recompute;
use pfr_client::{Counted, Destination, Progress, PullReport, Remote};
use pfr_schema::agent::{Outline, Warm, WarmItem, WarmRequest, WarmState};
use pfr_schema::{Digest, Selector};

/// References of a request.
const REFERENCES: usize = 64;
/// Snapshots of one repository by `newest`.
const NEWEST: u32 = 1000;
/// Least limit of bytes a second: a piece of an answer has some hundred KiB.
const LEAST_RATE: u64 = 64 << 10;
/// How long a snapshot is kept if nothing else is said: a day.
const KEEP_SECONDS: u64 = 24 * 60 * 60;
/// The longest time for which a request may keep one.
const LONGEST_KEEP_SECONDS: u64 = 30 * KEEP_SECONDS;

/// A snapshot to be fetched, beside its item in the list.
struct Planned {
    found: Found,
    digest: Digest,
    /// Raw bytes that the store lacks, and that no snapshot before brings.
    bytes: u64,
}

/// A plan under way.
#[derive(Default)]
struct Plan {
    warm: Warm,
    /// For each item, if it was found.
    planned: Vec<Option<Planned>>,
    /// What the snapshots so far bring: what several share is fetched once.
    counted: Counted,
}

/// The result of looking one snapshot up.
struct Look {
    digest: Digest,
    boundary: Option<u64>,
    bytes: u64,
    bytes_total: u64,
    /// What these are, and the plan did not have before.
    counted: Counted,
    /// Why it is left out.
    refusal: Option<Error>,
}

impl Agent {
    /// Checks a request before anything is asked for.
    pub(super) fn check_warm(&self, request: &WarmRequest) -> Result<()> {
        let wrong = |what: String| Err(Error::Invalid(what));
        if !(1..=REFERENCES).contains(&request.references.len()) {
            return wrong(format!("a warm takes 1 to {REFERENCES} references, found {}", request.references.len()));
        }
        for text in &request.references {
            self.registry_of(Wanted::parse(text, request.newest)?.registry.as_deref())?;
        }
        if request.newest.is_some_and(|newest| !(1..=NEWEST).contains(&newest)) {
            return wrong(format!("newest is a number from 1 to {NEWEST}"));
        }
        if request.keep_seconds.is_some_and(|seconds| seconds > LONGEST_KEEP_SECONDS) {
            return wrong(format!("snapshots are kept for {LONGEST_KEEP_SECONDS} seconds at most"));
        }
        if request.rate.is_some_and(|rate| rate < LEAST_RATE) {
            return wrong(format!("the least limit is {LEAST_RATE} bytes a second"));
        }
        check_speed(request.prefill_tokens_per_second)?;
        match &request.engine {
            Some(engine) if self.llamas().get(engine).is_none() => self.engines().get(engine).map(drop),
            _ => Ok(()),
        }
    }

    /// The base URL of the registry that a reference means.
    pub(super) fn registry_of(&self, named: Option<&str>) -> Result<String> {
        let registry = named.or(self.config().registry.as_deref());
        let registry = registry.ok_or_else(|| Error::Invalid("the reference names no registry and the agent has none; name one".into()))?;
        Ok(registry.trim_end_matches('/').to_owned())
    }

    /// The plan of a warm. A registry that does not answer is an error.
    pub(super) async fn plan_warm(&self, request: &WarmRequest) -> Result<Warm> {
        Ok(self.plan_of(request, None).await?.warm)
    }

    /// Fetches, and waits for a registry that does not answer.
    pub(super) async fn warm(&self, request: &WarmRequest, handle: &Handle) -> Result<()> {
        let Plan { warm, planned, .. } = self.plan_of(request, Some(handle)).await?;
        handle.update(|job| {
            job.bytes_total = warm.bytes;
            job.error = warm.items.iter().find(|item| item.state == WarmState::Failed).and_then(|item| item.problem.clone());
            job.warm = Some(warm);
        });
        handle.save().await;
        let mut done = 0;
        for (number, planned) in planned.into_iter().enumerate() {
            let Some(planned) = planned else { continue };
            let bytes = planned.bytes;
            handle.item(number, |item| item.state = WarmState::Running);
            let fetched = self.fetch(request, &planned, done, handle).await;
            match fetched {
                Ok(Fetched { bytes_received, keep_ends_at }) => {
                    done += bytes;
                    handle.done(done);
                    metrics::counter!(names::WARM_BYTES).increment(bytes_received);
                    handle.item(number, |item| {
                        (item.state, item.bytes_received, item.keep_ends_at) = (WarmState::Done, bytes_received, keep_ends_at);
                    });
                }
                Err(error) => {
                    tracing::warn!(job = handle.id(), snapshot = %planned.digest, %error, "a snapshot was not pulled ahead");
                    let problem = error.problem();
                    handle.item(number, |item| (item.state, item.problem) = (WarmState::Failed, Some(problem.clone())));
                    handle.update(|job| {
                        job.error.get_or_insert(problem);
                    });
                }
            }
            handle.save().await;
            self.tidy();
        }
        Ok(())
    }

    /// Looks everything up, and what of it is not here.
    async fn plan_of(&self, request: &WarmRequest, handle: Option<&Handle>) -> Result<Plan> {
        let mut plan = Plan::default();
        let mut left = self.budget(request);
        for text in &request.references {
            let wanted = Wanted::parse(text, request.newest)?;
            let mut tries = Tries::default();
            let found = loop {
                match wanted.find(self, room(plan.planned.len())).await {
                    Ok(found) => break Ok(found),
                    Err(error) => match again(self, handle, &mut tries, error).await {
                        Ok(()) => {}
                        // Too many, or a registry that does not answer a plan.
                        Err(error) if matches!(&error, Error::Invalid(_)) || is_away(&error) => return Err(error),
                        Err(error) => break Err(error),
                    },
                }
            };
            match found {
                Err(error) => plan.add(failed(wanted.text(), &error), None),
                Ok(found) if found.is_empty() => {
                    let error = Error::NothingMatches { pattern: wanted.text().to_owned() };
                    plan.add(failed(wanted.text(), &error), None);
                }
                Ok(found) => {
                    for found in found {
                        self.plan_one(request, found, handle, &mut left, &mut plan).await?;
                    }
                }
            }
        }
        let warm = &mut plan.warm;
        let wanted = || warm.items.iter().filter(|item| item.state == WarmState::Planned);
        // What a registry says of a snapshot may be any number.
        let sum = |all: u64, one: u64| all.saturating_add(one);
        let bytes = wanted().map(|item| item.bytes).fold(0, sum);
        let tokens = wanted().filter_map(|item| item.boundary).fold(0, sum);
        (warm.bytes, warm.recompute_tokens) = (bytes, tokens);
        warm.recompute_seconds = recompute(tokens, request.prefill_tokens_per_second);
        let rates = [self.pull_rate().get(), request.rate.map(|rate| rate as f64)];
        warm.eta_seconds = rates.into_iter().flatten().reduce(f64::min).map(|rate| bytes as f64 / rate);
        Ok(plan)
    }

    async fn plan_one(
        &self,
        request: &WarmRequest,
        found: Found,
        handle: Option<&Handle>,
        left: &mut Option<u64>,
        plan: &mut Plan,
    ) -> Result<()> {
        let mut tries = Tries::default();
        let looked = loop {
            match self.look_at(request, &found, &plan.counted).await {
                Ok(looked) => break Ok(looked),
                Err(error) => match again(self, handle, &mut tries, error).await {
                    Ok(()) => {}
                    Err(error) if is_away(&error) => return Err(error),
                    Err(error) => break Err(error),
                },
            }
        };
        let Look { digest, boundary, bytes, bytes_total, counted, refusal } = match looked {
            Ok(look) => look,
            Err(error) => {
                plan.add(failed(&found.reference(), &error), None);
                return Ok(());
            }
        };
        let refusal = refusal.or_else(|| {
            let over = left.filter(|left| bytes > *left);
            over.map(|free| Error::NoRoom { what: "of the size that this job may fetch", needed: bytes, free, collected: false })
        });
        let mut item = WarmItem {
            reference: found.reference(),
            digest: Some(digest),
            boundary,
            bytes,
            bytes_total,
            bytes_received: 0,
            state: WarmState::Planned,
            keep_ends_at: None,
            problem: None,
        };
        if let Some(error) = refusal {
            (item.state, item.problem) = (WarmState::Skipped, Some(error.problem()));
            plan.add(item, None);
            return Ok(());
        }
        if let Some(left) = left {
            *left -= bytes;
        }
        plan.counted.add(counted);
        plan.add(item, Some(Planned { found, digest, bytes }));
        Ok(())
    }

    /// Looks one snapshot up, and what the plan did not count yet. Asks for no page.
    async fn look_at(&self, request: &WarmRequest, found: &Found, counted: &Counted) -> Result<Look> {
        let remote = self.config().remote_to_pull_from(&found.registry)?;
        let said = pfr_client::look_up(&remote, &found.repository, &found.selector).await?;
        let digest = said.summary.digest;
        let outline = Outline::of(&said, false)?;
        let refusal = match request.engine.as_ref().and_then(|engine| self.check(engine, &outline).err()) {
            None if self.waits_to_be_pushed(found) => Some(Error::NewerHere { reference: found.reference() }),
            refusal => refusal,
        };
        let boundary = outline.boundary;
        if refusal.is_some() {
            let (bytes_total, counted) = (said.summary.logical_bytes, Counted::default());
            return Ok(Look { digest, boundary, bytes: 0, bytes_total, counted, refusal });
        }
        let (lacking, counted) = pfr_client::lacking(&remote, &found.repository, digest, self.store(), counted).await?;
        Ok(Look { digest, boundary, bytes: lacking.bytes, bytes_total: lacking.bytes_total, counted, refusal })
    }

    /// Whether this host has saved under this tag what the registry does not have yet: a pull would
    /// move the tag of the store back.
    fn waits_to_be_pushed(&self, found: &Found) -> bool {
        let Some(tag) = found.selector.tag() else { return false };
        self.pushes().waits(&format!("{}/{}:{tag}", found.registry, found.repository))
    }

    /// Raw bytes that a job may fetch.
    fn budget(&self, request: &WarmRequest) -> Option<u64> {
        let half = || self.config().max_store_size.map(|size| (size.0 / 2).saturating_sub(self.jobs().kept_bytes()));
        request.max_bytes.or_else(half)
    }

    /// Pulls one snapshot, and waits for a registry that does not answer.
    async fn fetch(&self, request: &WarmRequest, planned: &Planned, done: u64, handle: &Handle) -> Result<Fetched> {
        let Planned { found, digest, bytes } = planned;
        // Two jobs that want it fetch it once: the second finds it here.
        let lock = self.jobs().fetch(*digest);
        let _one = lock.lock().await;
        // Given back at once: this may wait for its registry for days.
        drop(self.room().take(*bytes).await?);
        let (mut tries, mut received, mut done) = (Tries::default(), 0, done);
        let brake = self.priority().brake(request.rate);
        let report = loop {
            let progress = Progress::default();
            handle.follow(&progress);
            // The token may have been renewed since the last try.
            let pulled = match self.config().remote_to_pull_from(&found.registry) {
                Ok(remote) => self.pull_planned(&remote.braked(brake.clone()), planned, &progress).await,
                Err(error) => Err(error),
            };
            match pulled {
                Ok(report) => break report,
                Err(error) => {
                    // Bytes that came stay, and are not fetched again.
                    let came = progress.bytes_done();
                    (done, received) = (done + came, received + came);
                    handle.done(done);
                    handle.again(self, &mut tries, error).await?;
                }
            }
        };
        if request.rate.is_none() {
            self.pull_rate().note(report.bytes_received_raw, report.seconds);
        }
        let keep_ends_at = match request.keep_seconds.unwrap_or(KEEP_SECONDS) {
            0 => None,
            seconds => Some(self.keep_pulled(planned, seconds, report.bytes_raw, handle).await?),
        };
        Ok(Fetched { bytes_received: report.bytes_received + received, keep_ends_at })
    }

    /// Keeps a snapshot that was pulled, and tries again while the disk or the store fails: what
    /// was pulled is here, and is not pulled again. Returns until when it is kept.
    async fn keep_pulled(&self, Planned { found, digest, .. }: &Planned, seconds: u64, bytes: u64, handle: &Handle) -> Result<u64> {
        let mut tries = Tries::default();
        loop {
            let ends_at = self.store().options().clock.now().saturating_add(seconds * 1000);
            match self.jobs().keep(&found.repository, *digest, ends_at, bytes).await {
                Ok(ends_at) => return Ok(ends_at),
                Err(error) => handle.again_here(self, &mut tries, error).await?,
            }
        }
    }

    async fn pull_planned(&self, remote: &Remote, Planned { found, digest, .. }: &Planned, progress: &Progress) -> Result<PullReport> {
        // A save of this host may have taken the tag since the plan.
        let tag = found.selector.tag().filter(|_| !self.waits_to_be_pushed(found)).cloned();
        let (store, repository) = (self.store().clone(), found.repository.clone());
        let destination = Destination::Store { store, repository, tag };
        // By its digest: the tag may have moved since the plan.
        Ok(pfr_client::pull(remote, &found.repository, &Selector::Digest(*digest), &destination, progress).await?)
    }
}

/// The result of a fetch.
struct Fetched {
    bytes_received: u64,
    keep_ends_at: Option<u64>,
}

impl Plan {
    fn add(&mut self, item: WarmItem, planned: Option<Planned>) {
        self.warm.items.push(item);
        self.planned.push(planned);
    }
}

/// A job waits for a registry that does not answer; a plan fails.
async fn again(agent: &Agent, handle: Option<&Handle>, tries: &mut Tries, error: Error) -> Result<()> {
    match handle {
        Some(handle) => handle.again(agent, tries, error).await,
        None => Err(error),
    }
}

fn is_away(error: &Error) -> bool {
    matches!(error, Error::Client(error) if error.retryable())
}

fn failed(reference: &str, error: &Error) -> WarmItem {
    WarmItem {
        reference: reference.to_owned(),
        digest: None,
        boundary: None,
        bytes: 0,
        bytes_total: 0,
        bytes_received: 0,
        state: WarmState::Failed,
        keep_ends_at: None,
        problem: Some(error.problem()),
    }
}

/// A speed that a plan is made with.
pub(crate) fn check_speed(tokens_per_second: Option<f64>) -> Result<()> {
    match tokens_per_second {
        Some(speed) if !speed.is_finite() || speed <= 0.0 => Err(Error::Invalid("prefill_tokens_per_second is a number above 0".into())),
        _ => Ok(()),
    }
}
