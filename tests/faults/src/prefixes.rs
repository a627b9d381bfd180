//! What `match` must answer: the model is a look at every snapshot.

use crate::check::Library;
use crate::names::Names;
use crate::snapshots::{Snapshot, fingerprint, request};
use pfr_schema::api::MatchResponse;
use pfr_schema::{RepositoryName, prefix};
use pfr_store::{Budget, PrefixPath, Store};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::sync::Arc;

/// The index leads to snapshots that share so many tokens with a request, or that end before.
const BLOCK: u64 = prefix::BLOCK as u64;

/// Requests to each repository at rest.
const REQUESTS: usize = 4;
/// Look-ups in the index for a request: more than any needs here.
const LOOK_UPS: usize = 1 << 15;

/// Tokens of a request: those of a snapshot that was pushed somewhere, a part of them, or more.
#[must_use]
pub fn tokens(random: &mut StdRng, library: &Library) -> Vec<u32> {
    tokens_of(random, &library.values().collect::<Vec<_>>())
}

fn tokens_of(random: &mut StdRng, all: &[&Arc<Snapshot>]) -> Vec<u32> {
    let Some(snapshot) = (!all.is_empty()).then(|| all[random.random_range(0..all.len())]) else { return vec![1, 2, 3] };
    let mut tokens = snapshot.tokens.clone();
    match random.random_range(0..4) {
        0 => tokens.truncate(random.random_range(0..=tokens.len())),
        1 => tokens.extend(90_000..90_000 + random.random_range(1..50)),
        2 => tokens.extend(snapshot.tokens.last().into_iter().flat_map(|last| last + 1..last + 50)),
        _ => {}
    }
    tokens
}

/// Whether an answer can be true: the snapshot that it names saves what it says.
///
/// # Errors
/// In words: what is wrong.
pub fn is_sound(answer: &MatchResponse, tokens: &[u32], library: &Library) -> Result<(), String> {
    let saves = answer.digest.map(|digest| library.get(&digest).map(|snapshot| snapshot.saves(tokens)));
    match saves {
        None if answer.boundary == 0 => Ok(()),
        Some(Some(saves)) if saves == answer.boundary => Ok(()),
        _ => Err(format!("WRONG: {answer:?} for {} tokens, of which it saves {saves:?}", tokens.len())),
    }
}

/// Asks each repository at rest, and compares with the model. If the index may know a snapshot by
/// its end only, since its list of tokens was damaged when it was indexed, more than the ends need
/// not be found.
///
/// # Errors
/// In words: what was not found, or is wrong.
pub async fn found(store: &Store, names: &Names, library: &Library, random: &mut StdRng, ends_only: bool) -> Result<(), String> {
    store.index_prefixes(&Budget::default()).await.map_err(|e| format!("writing the prefix index: {e}"))?;
    for (name, repository) in names {
        let here: Vec<&Arc<Snapshot>> = repository.snapshots.keys().filter_map(|digest| library.get(digest)).collect();
        for _ in 0..REQUESTS {
            let tokens = tokens_of(random, &here);
            let answer = ask(store, name, tokens.clone()).await?;
            is_sound(&answer, &tokens, library)?;
            let all = || here.iter().map(|snapshot| (snapshot.saves(&tokens), snapshot.tokens.len() as u64));
            let best = all().map(|(saves, _)| saves).max().unwrap_or(0);
            let end = all().filter(|(saves, length)| saves == length).map(|(saves, _)| saves).max().unwrap_or(0);
            let least = if ends_only || best < BLOCK { end } else { best };
            if answer.truncated || !(least..=best).contains(&answer.boundary) {
                return Err(format!("WRONG: expected {least} to {best} tokens of {name} for {tokens:?}, found {answer:?}"));
            }
            if answer.digest.is_some_and(|digest| !repository.snapshots.contains_key(&digest)) {
                return Err(format!("WRONG: {answer:?} is not in {name}"));
            }
            indexed(store, name, tokens, end).await?;
        }
    }
    Ok(())
}

/// Whether the index alone leads to the longest snapshot that ends within a request. An answer
/// says less: it also comes from the newest snapshots, which are looked at besides.
async fn indexed(store: &Store, repository: &RepositoryName, tokens: Vec<u32>, end: u64) -> Result<(), String> {
    let path = Arc::new(PrefixPath::new(tokens, &fingerprint(), "", None));
    let hits = store.metadata().find_prefixes(repository.clone(), path, None, LOOK_UPS).await;
    let hits = hits.map_err(|e| format!("the prefix index of {repository}: {e}"))?;
    let found = hits.deepest.first().map_or(0, |hit| hit.tokens);
    if hits.truncated || found != end {
        return Err(format!("WRONG: a snapshot of {end} tokens is in {repository}, and the prefix index leads to {hits:?}"));
    }
    Ok(())
}

async fn ask(store: &Store, repository: &RepositoryName, tokens: Vec<u32>) -> Result<MatchResponse, String> {
    store.match_prefix(repository, &request(tokens)).await.map_err(|e| format!("match in {repository}: {e}"))
}
