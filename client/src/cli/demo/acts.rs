//! The play, act by act. Each act shows one promise, and fails if it is not kept.

use super::carve::damaged_copy;
use super::cast::{Cast, FORKS};
use super::compare::compare;
use super::narrator::Narrator;
use super::stage::Stage;
use crate::cli::commands::{log, pull, push, stats};
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, short_digests};
use crate::cli::progress::{Standing, watch};
use pfr_client::{Destination, Progress, PullReport, PushReport, PushTarget, Remote, RemoteOptions, Source};
use pfr_schema::api::{ForkRequest, Lineage, TagState};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::{Options, Store};
use std::path::Path;

const REPOSITORY: &str = "agent/main";
const PREFIX: &str = "try";
/// The fork that host B resumes, and the one it looks at afterwards.
const RESUMED: usize = 2;
const SECOND: usize = 3;

/// The play and its properties.
pub struct Play<'a> {
    narrator: &'a mut Narrator,
    stage: &'a Stage,
    cast: &'a Cast,
    remote: Remote,
    repository: RepositoryName,
    quiet: bool,
}

impl<'a> Play<'a> {
    /// Sets the scene.
    pub fn new(narrator: &'a mut Narrator, stage: &'a Stage, cast: &'a Cast, url: &str, quiet: bool) -> Result<Self, Failure> {
        let remote = Remote::new(url, RemoteOptions::default())?;
        Ok(Self { narrator, stage, cast, remote, repository: REPOSITORY.parse()?, quiet })
    }

    /// Every act.
    pub async fn all(&mut self) -> Result<(), Failure> {
        self.capture_and_push().await?;
        let step_2 = self.grow().await?;
        self.fork(step_2).await?;
        self.resume_elsewhere().await?;
        self.prove().await?;
        self.look_back().await?;
        self.damage(step_2).await
    }

    async fn capture_and_push(&mut self) -> Result<(), Failure> {
        self.narrator.step(self.cast.title())?;
        let dir = self.cast.first(self.narrator, self.stage, self.quiet).await?;
        let first = self.push(&dir, "step-1", None, None).await?;
        self.narrator.also(&format!("{} is durable now", first.digest))?;

        self.narrator.step("The same again: nothing to send")?;
        let again = self.push(&dir, "step-1", None, None).await?;
        expect(again.blobs_sent == 0, &format!("the second push should have sent nothing, it sent {}", count(again.blobs_sent, "frame")))?;
        expect(again.digest == first.digest, "the second push should have given the same digest")
    }

    async fn grow(&mut self) -> Result<Digest, Failure> {
        self.narrator.step("The agent goes on: only its new pages travel")?;
        let dir = self.cast.grown(self.narrator, self.stage, self.quiet).await?;
        let parent = self.resolve("step-1").await?;
        let grown = self.push(&dir, "step-2", Some(("step-1", parent)), None).await?;
        expect(grown.bytes_deduplicated > 0, "the grown snapshot should have shared pages with its parent")?;
        Ok(grown.digest)
    }

    async fn fork(&mut self, step_2: Digest) -> Result<(), Failure> {
        self.narrator.step("Three forks for nothing, then each goes its own way")?;
        self.narrator.command(&format!("pf fork {REPOSITORY}:step-2 -n {FORKS} --prefix {PREFIX}"))?;
        let request = ForkRequest { snapshot: "step-2".into(), count: FORKS as u32, prefix: PREFIX.into() };
        let forked = self.remote.fork(&self.repository, &request).await?;
        let names: Vec<&str> = forked.tags.iter().map(Tag::as_str).collect();
        self.narrator.result(&format!("{}: no bytes moved", names.join(", ")))?;
        let dirs = self.cast.forks(self.narrator, self.stage, self.quiet).await?;
        for (i, dir) in dirs.iter().take(FORKS).enumerate() {
            let tag = format!("{PREFIX}-{}", i + 1);
            self.push(dir, &tag, Some(("step-2", step_2)), Some(TagState::At(step_2))).await?;
        }
        Ok(())
    }

    async fn resume_elsewhere(&mut self) -> Result<(), Failure> {
        self.narrator.step("Host B picks up a fork: bit for bit what host A had")?;
        let store = Store::open(&self.stage.at("host-b/store"), Options::default()).await?;
        self.narrator.command("export PF_STORE=host-b/store")?;
        self.pull_to_store(&store, RESUMED).await?;
        let second = self.pull_to_store(&store, SECOND).await?;
        expect(second.bytes_deduplicated > 0, "host B's second pull should have found shared pages in its store")?;
        let tag = format!("{PREFIX}-{RESUMED}");
        let (here, there) = (format!("host-b/{tag}"), format!("host-a/{tag}"));
        self.narrator.command(&format!("pf pull {REPOSITORY}:{tag} ./{here}"))?;
        let report = self.pull(&tag, Destination::Directory { path: self.stage.at(&here), store: None }).await?;
        self.narrator.result(&pull::brief(&report))?;
        self.narrator.command(&format!("diff -r -x config.json {there} {here}"))?;
        let compared = compare(&self.stage.at(&there), &self.stage.at(&here))?;
        self.narrator.result(&format!(
            "equal: the manifest and {} of page bytes in {}",
            bytes(compared.bytes),
            count(compared.files, "file")
        ))
    }

    async fn prove(&mut self) -> Result<(), Failure> {
        self.narrator.step("Proof: the registry reads and hashes every byte of a snapshot")?;
        let tag = format!("{PREFIX}-{RESUMED}");
        self.narrator.command(&format!("pf verify {REPOSITORY}:{tag}"))?;
        let digest = self.resolve(&tag).await?;
        let verified = self.remote.verify(&self.repository, &digest).await?;
        self.narrator.result(&format!("whole: {}, {} read and hashed", count(verified.blobs, "blob"), bytes(verified.bytes)))
    }

    async fn look_back(&mut self) -> Result<(), Failure> {
        self.narrator.step("What there is now, and what it costs")?;
        self.narrator.command(&format!("pf log {REPOSITORY}"))?;
        let list = self.remote.snapshots(&self.repository, None, 100).await?;
        let lineage = Lineage { snapshots: list.snapshots, truncated: false };
        self.narrator.show(|out| log::print(out, &lineage))?;
        self.narrator.say("")?;
        self.narrator.command(&format!("pf stats {REPOSITORY}"))?;
        let costs = self.remote.stats(Some(&self.repository)).await?;
        self.narrator.show(|out| stats::print(out, &costs))?;
        expect(costs.dedup_ratio > 1.0, "forks should have shared pages")
    }

    async fn damage(&mut self, step_2: Digest) -> Result<(), Failure> {
        self.narrator.step("A page goes bad on host A's disk: one bit of it")?;
        let spare = FORKS + 1;
        let (good, bad) = (self.stage.at(&format!("host-a/{PREFIX}-{spare}")), self.stage.at("host-a/damaged"));
        // The last page is one that the registry has never seen: what it has, it does not ask for.
        let file = damaged_copy(&good, &bad, |m| m.pages().last().map(|p| p.v))?;
        let name = file.strip_prefix(&bad).unwrap_or(&file);
        self.narrator.also(&short_digests(&format!("host-a/damaged/{}", name.display())))?;
        self.narrator.command(&format!("pf push ./host-a/damaged {REPOSITORY}:damaged"))?;
        let refused = match self.send(&bad, "damaged", &[], None).await {
            Ok(report) => return Err(Failure::new(4, format!("a damaged page was accepted as {}", report.digest))),
            Err(failure) => failure,
        };
        let Failure::Error { exit: 4, message, .. } = &refused else { return Err(refused) };
        let message = message.replace(&format!("{}/", self.stage.root().display()), "");
        self.narrator.refusal(&short_digests(&message))?;
        let tag = self.remote.tag(&self.repository, &"damaged".parse()?).await;
        expect(matches!(&tag, Err(e) if e.code() == ErrorCode::TagUnknown), "the refused push should not have left a tag")?;
        self.narrator.result("refused with exit code 4, as it should be: no tag, nothing visible")?;
        self.narrator.also("the undamaged copy goes through, and what had arrived is not sent twice:")?;
        let tag = format!("{PREFIX}-{spare}");
        self.push(&good, &tag, Some(("step-2", step_2)), None).await.map(drop)
    }

    // ---- properties

    /// Pushes a directory as the command would, and says so.
    async fn push(
        &mut self,
        dir: &Path,
        tag: &str,
        parent: Option<(&str, Digest)>,
        if_tag_is: Option<TagState>,
    ) -> Result<PushReport, Failure> {
        let relative = dir.strip_prefix(self.stage.root()).unwrap_or(dir);
        let mut command = format!("pf push ./{} {REPOSITORY}:{tag}", relative.display());
        if let Some((name, _)) = parent {
            command.push_str(&format!(" --parent :{name}"));
        }
        if let Some(TagState::At(digest)) = if_tag_is {
            command.push_str(&format!(" --if-tag-is {}:{}…", digest.algorithm(), &digest.short()[..6]));
        }
        self.narrator.command(&command)?;
        let parents: Vec<Digest> = parent.iter().map(|(_, digest)| *digest).collect();
        let report = self.send(dir, tag, &parents, if_tag_is).await?;
        self.narrator.result(&push::brief(&report))?;
        Ok(report)
    }

    async fn send(&self, dir: &Path, tag: &str, parents: &[Digest], if_tag_is: Option<TagState>) -> Result<PushReport, Failure> {
        let target = PushTarget { repository: self.repository.clone(), tag: Some(tag.parse()?), if_tag_is, parents: parents.to_vec() };
        let (source, progress) = (Source::Directory(dir.to_owned()), Progress::default());
        let work = pfr_client::push(&source, &self.remote, target, &progress);
        Ok(watch(self.quiet, || Standing::of(&progress), work).await?)
    }

    async fn pull_to_store(&mut self, store: &Store, fork: usize) -> Result<PullReport, Failure> {
        let tag = format!("{PREFIX}-{fork}");
        self.narrator.command(&format!("pf pull {REPOSITORY}:{tag}"))?;
        let destination = Destination::Store { store: store.clone(), repository: self.repository.clone(), tag: Some(tag.parse()?) };
        let report = self.pull(&tag, destination).await?;
        self.narrator.result(&pull::brief(&report))?;
        Ok(report)
    }

    async fn pull(&self, tag: &str, destination: Destination) -> Result<PullReport, Failure> {
        let progress = Progress::default();
        let selector: Selector = tag.parse()?;
        let work = pfr_client::pull(&self.remote, &self.repository, &selector, &destination, &progress);
        Ok(watch(self.quiet, || Standing::of(&progress), work).await?)
    }

    async fn resolve(&self, tag: &str) -> Result<Digest, Failure> {
        Ok(self.remote.tag(&self.repository, &tag.parse()?).await?.digest)
    }
}

/// A promise that the demo shows.
fn expect(kept: bool, otherwise: &str) -> Result<(), Failure> {
    if kept { Ok(()) } else { Err(Failure::new(70, otherwise)) }
}
