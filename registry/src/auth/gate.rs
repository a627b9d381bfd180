//! Which tokens are valid: those of the registry, and those of issuers ([`crate::jwt`]).
//!
//! A push sends thousands of requests. So what the database said about a token is believed for a
//! few seconds, and a revoked token may be used for that long, except in the process that revoked
//! it.

use super::caller::{Caller, KnownCaller};
use super::credentials::{self, Credential};
use crate::audit::Trail;
use crate::http::permit::wait_for;
use crate::jwt::{Failure, Issuers};
use crate::problem::ApiError;
use crate::rates::Rates;
use axum::http::request::Parts;
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::{AccessTokenId, Digest, ErrorCode};
use pfr_store::{AccessTokenRow, AccessTokens, Clock};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How long a token counts as what the database said it is.
const FRESH: Duration = Duration::from_secs(5);
/// Tokens that are remembered; of more, those that were used last.
const TOKENS: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// Unknown tokens that are remembered as such. They have a memory of their own: a flood of made-up
/// ones must not push valid ones out.
const UNKNOWN: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");
/// Unknown tokens that the database is asked about at a time.
const QUESTIONS: usize = 2;
/// How long a request with an unknown token waits for its turn to ask.
const TURN: Duration = Duration::from_secs(5);

/// What a request is told whose turn does not come.
const BUSY: &str = "the registry checks as many unknown access tokens as it may; this says nothing about the token, try again in a moment";

/// What the database said about a token.
struct Known {
    asked: Instant,
    /// None: there is no such token.
    row: Option<Arc<AccessTokenRow>>,
}

impl Known {
    /// Whether it is still believed, and the token.
    fn read(&self) -> (bool, Option<Arc<AccessTokenRow>>) {
        (self.asked.elapsed() < FRESH, self.row.clone())
    }
}

/// What the database said about tokens, by the hash of the complete token.
struct Tokens {
    /// Tokens that there are.
    known: LruCache<Digest, Known>,
    /// Tokens that there are not.
    unknown: LruCache<Digest, Known>,
    /// How many were revoked by this process.
    revoked: u64,
}

impl Tokens {
    fn new() -> Self {
        Self { known: LruCache::new(TOKENS), unknown: LruCache::new(UNKNOWN), revoked: 0 }
    }

    /// What is known of a token, and whether that is still believed.
    fn get(&mut self, hash: &Digest) -> Option<(bool, Option<Arc<AccessTokenRow>>)> {
        self.known.get(hash).or_else(|| self.unknown.get(hash)).map(Known::read)
    }

    /// Keeps an answer of the database that was asked for when so many had been revoked. One that
    /// is older than a revocation is not kept: it may be about the revoked token.
    fn keep(&mut self, hash: Digest, known: Known, revoked: u64) {
        if self.revoked != revoked {
            return;
        }
        let (is_in, is_not_in) = match known.row {
            Some(_) => (&mut self.known, &mut self.unknown),
            None => (&mut self.unknown, &mut self.known),
        };
        is_in.put(hash, known);
        is_not_in.pop(&hash);
    }

    fn forget(&mut self, id: &AccessTokenId) {
        self.revoked += 1;
        let of_token = |row: &Option<Arc<AccessTokenRow>>| row.as_ref().is_some_and(|row| row.id == *id);
        let hashes: Vec<Digest> = self.known.iter().filter(|(_, known)| of_token(&known.row)).map(|(hash, _)| *hash).collect();
        for hash in hashes {
            self.known.pop(&hash);
        }
    }
}

/// The check of tokens.
pub(crate) struct Gate {
    tokens: AccessTokens,
    clock: Clock,
    /// Callers without a valid token are counted here.
    rates: Arc<Rates>,
    known: Mutex<Tokens>,
    /// Places for questions about unknown tokens.
    questions: Arc<Semaphore>,
    /// Those whose tokens are accepted besides our own.
    issuers: Option<Arc<Issuers>>,
}

impl Gate {
    pub(crate) fn new(tokens: AccessTokens, clock: Clock, issuers: Option<Arc<Issuers>>, rates: Arc<Rates>) -> Self {
        Self { tokens, clock, rates, known: Mutex::new(Tokens::new()), questions: Arc::new(Semaphore::new(QUESTIONS)), issuers }
    }

    /// The caller of a request.
    ///
    /// # Errors
    /// `unauthorized`, with one message for all reasons. `rate_limited` for a source address
    /// without a valid token that asks too often. `overloaded` if too many unknown tokens came
    /// before this one; `unavailable` if the database cannot be asked, or an issuer for its keys:
    /// both say nothing about the token.
    pub(super) async fn caller(&self, parts: &Parts) -> Result<Caller, ApiError> {
        let address = parts.extensions.get::<Trail>().and_then(Trail::source);
        let refused = || {
            let detail = "an access token is needed: none was sent, or the one that was sent is unknown, has expired or was revoked";
            self.rates.stranger(address).err().unwrap_or_else(|| ApiError::new(ErrorCode::Unauthorized, detail))
        };
        let known_as = |caller: Caller| {
            if let Some(known) = parts.extensions.get::<KnownCaller>() {
                known.set(&caller);
            }
            caller
        };
        let token = match (credentials::of(&parts.headers), &self.issuers) {
            (Some(Credential::Ours(token)), _) => token,
            // No question to the database, and keys are fetched now and then only: a flood is
            // counted by its refusals.
            (Some(Credential::Issued(token)), Some(issuers)) => {
                let subject = issuers.subject(token.expose()).await.map_err(|failure| match failure {
                    Failure::Refused(reason) => refused().because(reason),
                    Failure::Unavailable(reason) => {
                        let detail = "the registry has no keys of the token's issuer; this says nothing about the token, try again";
                        ApiError::new(ErrorCode::Unavailable, detail).because(reason)
                    }
                })?;
                return Ok(known_as(Caller::Subject(Arc::new(subject))));
            }
            _ => return Err(refused()),
        };
        let hash = token.hash();
        let known = self.known.lock().get(&hash);
        let row = match known {
            Some((true, row)) => row,
            before => {
                // A flood of made-up tokens must not become one of questions to the database. A
                // valid token waits for its turn: it may come from the same address.
                let is_known = matches!(before, Some((_, Some(_))));
                let _turn = if is_known { None } else { Some(wait_for(&self.questions, TURN, BUSY).await?) };
                let (asked, revoked) = (Instant::now(), self.known.lock().revoked);
                let row = self.tokens.find(&token).await?.map(Arc::new);
                self.known.lock().keep(hash, Known { asked, row: row.clone() }, revoked);
                if let Some(row) = row.clone().filter(|row| row.is_valid(self.clock.now())) {
                    self.note_use(row);
                }
                row
            }
        };
        let row = row.filter(|row| row.is_valid(self.clock.now())).ok_or_else(refused)?;
        Ok(known_as(Caller::Holder(row)))
    }

    /// Notes whose token a request carries that is refused in any case. One without a valid token
    /// has nothing to note.
    pub(crate) async fn identify(&self, parts: &Parts) {
        drop(self.caller(parts).await);
    }

    /// A token was revoked by this process: here it is refused at once.
    pub(crate) fn forget(&self, id: &AccessTokenId) {
        self.known.lock().forget(id);
    }

    /// Notes the use beside the request, which must not wait for it, nor fail with it.
    fn note_use(&self, row: Arc<AccessTokenRow>) {
        let tokens = self.tokens.clone();
        pfr_service::task::spawn(async move {
            if let Err(error) = tokens.note_use(&row).await {
                tracing::debug!(%error, token = %row.id, "noting the use of a token failed");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use axum::http::{Request, header};
    use pfr_schema::AccessToken;
    use pfr_store::{Domains, Options, Store};

    /// What the database says about a token that it has.
    fn known(token: &AccessToken) -> Known {
        let row = AccessTokenRow {
            id: token.id(),
            hash: token.hash(),
            label: String::new(),
            domain: None,
            scopes: Vec::new(),
            created_at: 0,
            expires_at: None,
            used_at: None,
            revoked_at: None,
        };
        Known { asked: Instant::now(), row: Some(Arc::new(row)) }
    }

    fn unknown() -> Known {
        Known { asked: Instant::now(), row: None }
    }

    #[test]
    fn made_up_tokens_push_no_valid_one_out() {
        let mut tokens = Tokens::new();
        let valid = AccessToken::new([1; 8], [2; 32]);
        tokens.keep(valid.hash(), known(&valid), 0);
        for n in 0..TOKENS.get() + UNKNOWN.get() {
            tokens.keep(Digest::sha256(&n.to_le_bytes()), unknown(), 0);
        }
        assert!(tokens.get(&valid.hash()).is_some_and(|(_, row)| row.is_some()));
        assert_eq!(tokens.unknown.len(), UNKNOWN.get(), "and the made-up ones have their own bound");
        // A token is one or the other.
        tokens.keep(valid.hash(), unknown(), 0);
        assert!(tokens.get(&valid.hash()).is_some_and(|(_, row)| row.is_none()));
        tokens.keep(valid.hash(), known(&valid), 0);
        assert!(tokens.get(&valid.hash()).is_some_and(|(_, row)| row.is_some()));
    }

    #[tokio::test]
    async fn an_unknown_token_waits_for_its_turn_only_so_long() {
        let store = Store::open_in_memory(Options::default()).await.unwrap();
        let tokens = Domains::new(store, None).access_tokens();
        let gate = Gate::new(tokens, Clock::system(), None, Rates::new(&Config::default()));
        let made_up = AccessToken::new([1; 8], [2; 32]);
        let request = Request::builder().header(header::AUTHORIZATION, format!("Bearer {}", made_up.expose())).body(()).unwrap();
        let (parts, ()) = request.into_parts();
        let questions = Arc::clone(&gate.questions).acquire_many_owned(QUESTIONS as u32).await.unwrap();
        tokio::time::pause();
        let refused = gate.caller(&parts).await.err().unwrap();
        assert_eq!((refused.code, refused.retry_after()), (ErrorCode::Overloaded, Some(1)));
        tokio::time::resume();
        drop(questions);
        assert_eq!(gate.caller(&parts).await.err().unwrap().code, ErrorCode::Unauthorized);
    }

    #[test]
    fn an_answer_from_before_a_revocation_is_not_believed_after_it() {
        let (token, other) = (AccessToken::new([1; 8], [2; 32]), AccessToken::new([3; 8], [4; 32]));
        let mut tokens = Tokens::new();
        tokens.keep(token.hash(), known(&token), tokens.revoked);
        tokens.keep(other.hash(), known(&other), tokens.revoked);
        assert!(tokens.get(&token.hash()).is_some_and(|(is_fresh, row)| is_fresh && row.is_some()));
        // The database is asked, the token is revoked, the answer arrives.
        let before = tokens.revoked;
        tokens.forget(&token.id());
        tokens.keep(token.hash(), known(&token), before);
        assert!(tokens.get(&token.hash()).is_none());
        assert!(tokens.get(&other.hash()).is_some());
        tokens.keep(token.hash(), unknown(), tokens.revoked);
        assert!(tokens.get(&token.hash()).is_some_and(|(_, row)| row.is_none()));
    }
}
