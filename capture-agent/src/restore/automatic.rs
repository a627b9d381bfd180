//! Automatic mode: the agent looks for the state of a request in its own store and in its registry,
//! and keeps what it finds ready. One search for each request, in a task of its own: it goes on if
//! the request waits no longer, and the next one finds the state ready.

use super::fits::Asked;
use crate::Agent;
use crate::engines::Engine;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_client::Site;
use pfr_schema::api::{MatchRequest, MatchResponse};
use pfr_schema::engine::{Find, Match, MatchKeys, Matched, Resume, Tier};
use pfr_schema::{Digest, ErrorCode, RepositoryName};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long an answer waits for a search before it says "later". An engine waits longer for it.
const LOOK: Duration = Duration::from_millis(300);
/// Searches at a time, and those that are remembered. Each keeps the tokens of its request.
const MAX: usize = 64;
/// How long a search is remembered whose request has gone on without it.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Bytes of a name.
const NAME: usize = 64;

/// The snapshot that was found, if any; `None` while the search goes on.
type Found = Option<Option<(Digest, Tier)>>;

/// Searches, by engine and name.
#[derive(Debug, Default)]
pub struct Searches(Mutex<BTreeMap<(String, String), Search>>);

#[derive(Clone, Debug)]
struct Search {
    request: Arc<Match>,
    begun: Instant,
    found: watch::Receiver<Found>,
}

impl Searches {
    /// The search of this name, begun with its first call; `None` if too many are under way.
    fn of(&self, agent: &Agent, engine: &Engine, find: Find) -> Result<Option<Search>> {
        let Find { name, repository, least, limit_ms, request } = find;
        if !(1..=NAME).contains(&name.len()) {
            return Err(Error::Invalid(format!("a search's name has 1 to {NAME} bytes, found {}", name.len())));
        }
        let key = (engine.name().to_owned(), name);
        let mut searches = self.0.lock();
        if let Some(search) = searches.get(&key) {
            return Ok(Some(search.clone()));
        }
        let (Some(repository), Some(request)) = (repository, request.map(Arc::new)) else {
            return Err(Error::Invalid(format!("no search {:?}: its first call names a repository and the request", key.1)));
        };
        searches.retain(|_, search| is_open(&search.found) || search.begun.elapsed() < REMEMBERED);
        if searches.len() >= MAX {
            searches.retain(|_, search| is_open(&search.found));
        }
        if searches.len() >= MAX {
            return Ok(None);
        }
        let (tell, found) = watch::channel(None);
        let search = Search { request: Arc::clone(&request), begun: Instant::now(), found };
        searches.insert(key, search.clone());
        let wanted = Wanted { agent: agent.clone(), engine: engine.clone(), repository, least, request };
        pfr_service::task::spawn(async move {
            let found = wanted.look(Duration::from_millis(limit_ms)).await;
            tell.send_replace(Some(found));
        });
        Ok(Some(search))
    }

    fn forget(&self, engine: &Engine, name: &str) {
        self.0.lock().remove(&(engine.name().to_owned(), name.to_owned()));
    }
}

fn is_open(found: &watch::Receiver<Found>) -> bool {
    // Without a sender its task has panicked.
    found.borrow().is_none() && found.has_changed().is_ok()
}

/// Answers a request that is looked for.
pub(super) async fn find(agent: &Agent, engine: &Engine, find: Find) -> Result<Matched> {
    let name = find.name.clone();
    let Some(mut search) = agent.searches().of(agent, engine, find)? else {
        return Ok(Matched::None { reason: format!("{MAX} searches are under way") });
    };
    let found = match tokio::time::timeout(LOOK, search.found.wait_for(Option::is_some)).await {
        Ok(Ok(found)) => (*found).flatten(),
        Ok(Err(_)) => None,
        Err(_) => return Ok(Matched::Later {}),
    };
    let Some((digest, tier)) = found else {
        agent.searches().forget(engine, &name);
        return Ok(Matched::None { reason: "neither the agent's store nor its registry has state for it".into() });
    };
    let asked = Asked::Tokens(Match::clone(&search.request));
    let matched = match agent.staged().find(engine, &asked, Some(digest)) {
        Matched::Ready { boundary, restore, digest, partly, .. } => Matched::Ready { boundary, restore, digest, partly, tier: Some(tier) },
        other => other,
    };
    if matched != (Matched::Later {}) {
        agent.searches().forget(engine, &name);
    }
    Ok(matched)
}

/// What is looked for.
struct Wanted {
    agent: Agent,
    engine: Engine,
    repository: RepositoryName,
    least: u64,
    request: Arc<Match>,
}

/// A snapshot that can be used up to a token position.
#[derive(Clone, Copy)]
struct Candidate {
    position: u64,
    digest: Digest,
    tier: Tier,
}

impl Wanted {
    /// Finds the deepest state, and makes it ready.
    async fn look(&self, limit: Duration) -> Option<(Digest, Tier)> {
        // One token at least is left to compute: its logits are needed.
        let tokens = self.request.tokens.split_last().map_or(&[][..], |(_, computed)| computed).to_vec();
        let most = tokens.len() as u64;
        let (salt, adapter) = (self.request.salt.clone(), self.request.adapter.clone());
        let asked = MatchRequest { tokens, fingerprint: self.engine.fingerprint(), salt, adapter };
        let mut best = self.staged();
        let position = |best: Option<Candidate>| best.map_or(0, |best| best.position);
        if let Some(found) = self.local(&asked).await.filter(|found| found.position > position(best)) {
            best = Some(found);
        }
        // The registry is asked only if it may save as much more, and a pull must save that.
        let least = position(best).saturating_add(self.least);
        if least <= most
            && let Some(found) = self.remote(&asked, limit).await.filter(|found| found.position >= least)
        {
            best = Some(found);
        }
        let best = best.filter(|best| best.position >= self.least)?;
        self.ready(best).await
    }

    /// What lies ready.
    fn staged(&self) -> Option<Candidate> {
        match self.agent.staged().find(&self.engine, &Asked::Tokens(Match::clone(&self.request)), None) {
            Matched::Ready { boundary, digest, .. } => Some(Candidate { position: boundary, digest, tier: Tier::Memory }),
            _ => None,
        }
    }

    async fn local(&self, asked: &MatchRequest) -> Option<Candidate> {
        let store = Site::Store(self.agent.store().clone());
        self.candidate(Tier::Store, store.match_prefix(&self.repository, asked).await)
    }

    async fn remote(&self, asked: &MatchRequest, limit: Duration) -> Option<Candidate> {
        let registry = self.agent.config().registry.as_deref()?;
        let remote = match self.agent.config().remote(registry) {
            Ok(remote) => remote,
            Err(error) => {
                tracing::warn!(registry, %error, "looking for state in the registry failed");
                return None;
            }
        };
        let Ok(found) = tokio::time::timeout(limit, remote.match_prefix(&self.repository, asked)).await else {
            tracing::info!(registry, repository = %self.repository, ?limit, "the registry did not say in time whether it has state");
            return None;
        };
        self.candidate(Tier::Registry, found)
    }

    fn candidate(&self, tier: Tier, found: std::result::Result<MatchResponse, pfr_client::Error>) -> Option<Candidate> {
        match found {
            Ok(found) => found.digest.map(|digest| Candidate { position: found.boundary, digest, tier }),
            // Nothing was saved there yet.
            Err(error) if error.code() == ErrorCode::RepositoryUnknown => None,
            Err(error) => {
                tracing::info!(repository = %self.repository, ?tier, %error, "looking for state failed");
                None
            }
        }
    }

    /// Pulls and verifies a snapshot, unless that is done; shares the work with other requests.
    async fn ready(&self, Candidate { digest, tier, .. }: Candidate) -> Option<(Digest, Tier)> {
        if tier == Tier::Memory || self.agent.staged().is_ready(self.engine.name(), &digest) {
            return Some((digest, tier));
        }
        let reference = format!("{}@{digest}", self.repository);
        let resume = Resume { reference, first: true, request: MatchKeys::default() };
        let mut lookup = self.agent.resumes().of(&self.agent, self.engine.name(), &resume)?;
        let outcome = lookup.wait_for(Option::is_some).await.ok()?.clone()?;
        match outcome {
            Ok(digest) => Some((digest, tier)),
            Err(reason) => {
                tracing::info!(engine = self.engine.name(), %digest, reason, "state that was found cannot be used");
                None
            }
        }
    }
}
