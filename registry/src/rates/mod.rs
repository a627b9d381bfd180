//! Limits on what a caller, and all callers of a domain together, may ask of this process: requests
//! per second, and bytes of bodies per second.
//!
//! ```text
//! Access: caller, domain ─▶ Rates::admit ─▶ too many requests: 429 `rate_limited` with Retry-After
//!                                        └▶ a body: its Throttle, which lets it wait
//! ```
//!
//! A caller is the holder of a valid token. Without one it is the source address, an IPv6 network
//! as one. Requests beyond a limit are refused at once: they hold nothing while their client waits.
//! Streams are slowed down, because one of them may be larger than any limit: pieces of all streams
//! of a caller are admitted in the order in which they came. A stream that waits here counts as one
//! that waits for its client, so it keeps no place from others.

mod bucket;
mod throttle;

pub(crate) use throttle::{Direction, Flow, Throttled};

use crate::auth::Caller;
use crate::config::Config;
use crate::http::address::network;
use crate::metrics::{RATE_LIMITED, THROTTLED};
use crate::problem::ApiError;
use bucket::{Bucket, Rate};
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::{DomainName, ErrorCode};
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use throttle::Throttle;
use tokio::time::Instant;

/// Callers and domains that are remembered; of more, those that asked last. One that is forgotten
/// begins anew, which costs a burst.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(65_536).expect("not zero");

/// The subject of limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    /// The holder of a token, by its id; of the token of an issuer, by subject and issuer.
    Token(Arc<str>),
    /// A caller without a valid token.
    Address(IpAddr),
    /// All callers of a domain.
    Domain(DomainName),
}

impl Key {
    /// A caller: the holder of a token, or else a source address. None if there is neither.
    pub(crate) fn of(caller: &Caller, address: Option<IpAddr>) -> Option<Self> {
        let token = caller.id().map(|id| Self::Token(id.into()));
        token.or_else(|| address.map(|address| Self::Address(network(address))))
    }

    /// Its kind, a label of metrics.
    fn kind(&self) -> &'static str {
        match self {
            Self::Token(_) => "token",
            Self::Address(_) => "address",
            Self::Domain(_) => "domain",
        }
    }

    /// What a refused caller is told.
    pub(crate) fn words(&self) -> String {
        match self {
            Self::Token(_) => "with this access token".to_owned(),
            Self::Address(_) => "from this address".to_owned(),
            Self::Domain(name) => format!("for the domain {name}"),
        }
    }
}

/// The limits on one kind of subject.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    requests: Option<Rate>,
    bytes: Option<Rate>,
}

/// What a subject has used.
#[derive(Default)]
struct Used {
    requests: Bucket,
    up: Bucket,
    down: Bucket,
}

/// All limits of this process, and what was used of them.
pub(crate) struct Rates {
    caller: Limits,
    domain: Limits,
    /// Whether there is any limit.
    is_limited: bool,
    used: Mutex<LruCache<Key, Used>>,
}

impl Rates {
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        let burst = Duration::from_secs(config.burst_seconds);
        let limits = |requests, bytes| Limits { requests: Rate::new(requests, burst), bytes: Rate::new(bytes, burst) };
        let caller = limits(config.caller_requests_per_second, config.caller_bytes_per_second);
        let domain = limits(config.domain_requests_per_second, config.domain_bytes_per_second);
        let all = [caller.requests, caller.bytes, domain.requests, domain.bytes];
        Arc::new(Self { caller, domain, is_limited: all.iter().any(Option::is_some), used: Mutex::new(LruCache::new(REMEMBERED)) })
    }

    fn limits(&self, key: &Key) -> &Limits {
        if matches!(key, Key::Domain(_)) { &self.domain } else { &self.caller }
    }

    /// Counts a request of a caller; one that is permitted also for its domain. Sets how fast its
    /// stream may be, if it has one.
    ///
    /// # Errors
    /// `rate_limited`.
    pub(crate) fn admit(
        self: &Arc<Self>,
        caller: &Caller,
        address: Option<IpAddr>,
        domain: Option<&DomainName>,
        stream: Option<&Throttled>,
    ) -> Result<(), ApiError> {
        if !self.is_limited {
            return Ok(());
        }
        let keys: Vec<Key> = Key::of(caller, address).into_iter().chain(domain.cloned().map(Key::Domain)).collect();
        for key in &keys {
            self.count(key)?;
        }
        if let Some(stream) = stream {
            let keys: Vec<Key> = keys.into_iter().filter(|key| self.limits(key).bytes.is_some()).collect();
            if !keys.is_empty() {
                stream.set(Throttle::new(Arc::clone(self), keys));
            }
        }
        Ok(())
    }

    /// Counts a request of a caller that has no valid token.
    ///
    /// # Errors
    /// `rate_limited`.
    pub(crate) fn stranger(&self, address: Option<IpAddr>) -> Result<(), ApiError> {
        address.map_or(Ok(()), |address| self.count(&Key::Address(network(address))))
    }

    fn count(&self, key: &Key) -> Result<(), ApiError> {
        let Some(rate) = self.limits(key).requests else { return Ok(()) };
        let taken = self.used.lock().get_or_insert_mut(key.clone(), Used::default).requests.take(rate, Instant::now());
        taken.map_err(|wait| refused(key, rate, wait))
    }

    /// Counts bytes that moved; how long the stream must wait before the next ones.
    fn moved(&self, keys: &[Key], direction: Direction, bytes: u64) -> Duration {
        let (now, mut all) = (Instant::now(), self.used.lock());
        let waits = keys.iter().filter_map(|key| {
            let rate = self.limits(key).bytes?;
            let used = all.get_or_insert_mut(key.clone(), Used::default);
            let bucket = match direction {
                Direction::Up => &mut used.up,
                Direction::Down => &mut used.down,
            };
            Some(bucket.charge(rate, bytes, now))
        });
        let wait = waits.max().unwrap_or_default();
        drop(all);
        if !wait.is_zero() {
            metrics::counter!(THROTTLED, "direction" => direction.name()).increment(bytes);
        }
        wait
    }
}

/// The refusal of a request that comes too early by `wait`.
fn refused(key: &Key, rate: Rate, wait: Duration) -> ApiError {
    metrics::counter!(RATE_LIMITED, "limit" => key.kind()).increment(1);
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let detail = format!("more than {} requests a second {}; try again in {seconds} s", rate.per_second(), key.words());
    ApiError::new(ErrorCode::RateLimited, detail).with_retry_after(seconds.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(change: impl FnOnce(&mut Config)) -> Arc<Rates> {
        let mut config = Config { burst_seconds: 2, ..Config::default() };
        change(&mut config);
        Rates::new(&config)
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some([10, 0, 0, last].into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_floods_is_refused_and_another_one_is_not() {
        let rates = rates(|config| config.caller_requests_per_second = 5);
        let ask = |last| rates.admit(&Caller::Anyone, address(last), None, None);
        let passed = (0..100).filter(|_| ask(1).is_ok()).count();
        assert_eq!(passed, 10, "two seconds' worth at once");
        let refused = ask(1).unwrap_err();
        assert_eq!((refused.code, refused.retry_after()), (ErrorCode::RateLimited, Some(1)));
        assert!(refused.detail.contains("5 requests a second from this address"), "{}", refused.detail);
        assert!((0..10).all(|_| ask(2).is_ok()), "another caller has a bucket of its own");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((0..100).filter(|_| ask(1).is_ok()).count(), 5, "a second later as many as a second brings");
    }

    #[tokio::test(start_paused = true)]
    async fn a_domain_is_limited_over_all_its_callers_and_only_by_permitted_requests() {
        let rates = rates(|config| config.domain_requests_per_second = 1);
        let domain = DomainName::default();
        for last in 0..100 {
            rates.admit(&Caller::Anyone, address(last), None, None).unwrap();
        }
        rates.admit(&Caller::Anyone, address(1), Some(&domain), None).unwrap();
        rates.admit(&Caller::Anyone, address(2), Some(&domain), None).unwrap();
        let refused = rates.admit(&Caller::Anyone, address(3), Some(&domain), None).unwrap_err();
        assert!(refused.detail.contains("for the domain default"), "{}", refused.detail);
        rates.admit(&Caller::Anyone, address(3), Some(&"other".parse().unwrap()), None).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_are_counted_by_their_failures_and_memory_is_bounded() {
        let rates = rates(|config| config.caller_requests_per_second = 1);
        assert!(rates.stranger(address(1)).is_ok() && rates.stranger(address(1)).is_ok());
        assert!(rates.stranger(address(1)).is_err() && rates.stranger(address(2)).is_ok());
        for n in 0..200_000_u32 {
            rates.stranger(Some(IpAddr::from(n.to_be_bytes()))).unwrap();
        }
        assert_eq!(rates.used.lock().len(), REMEMBERED.get());
    }

    #[tokio::test(start_paused = true)]
    async fn streams_of_one_caller_share_its_bytes_and_those_of_others_do_not() {
        let rates = rates(|config| config.caller_bytes_per_second = 1 << 20);
        let stream = |last| {
            let (flow, throttled) = Flow::new(Direction::Up);
            rates.admit(&Caller::Anyone, address(last), None, Some(&throttled)).unwrap();
            flow
        };
        let (mut one, mut two, mut other) = (stream(1), stream(1), stream(2));
        let began = Instant::now();
        for _ in 0..4 {
            for flow in [&mut one, &mut two] {
                std::future::poll_fn(|cx| flow.poll_ready(cx)).await;
                flow.moved(1 << 20);
            }
        }
        // Two MiB at once, and the last one may go before it is paid.
        let took = began.elapsed();
        assert!((Duration::from_secs(4)..=Duration::from_secs(6)).contains(&took), "8 MiB at 1 MiB/s took {took:?}");
        let began = Instant::now();
        std::future::poll_fn(|cx| other.poll_ready(cx)).await;
        other.moved(1 << 20);
        std::future::poll_fn(|cx| other.poll_ready(cx)).await;
        assert!(began.elapsed().is_zero(), "another caller does not wait");
    }
}
