//! Places for clients that follow events: so many in all, and of these so many for each caller.
//!
//! A stream lasts for hours. Without the second limit one token could keep all others out.

use crate::auth::Caller;
use crate::config::Config;
use crate::problem::ApiError;
use crate::rates::Key;
use parking_lot::Mutex;
use pfr_schema::ErrorCode;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Seconds after which a client should try again that got no place.
const TRY_AGAIN: u64 = 10;

/// The places of this process.
pub(crate) struct Places {
    all: Arc<Semaphore>,
    of_caller: usize,
    /// Streams of each caller that has one.
    taken: Mutex<HashMap<Key, usize>>,
}

/// A place, as long as it is held.
pub(crate) struct Place {
    places: Arc<Places>,
    /// None: neither a token nor an address is known.
    key: Option<Key>,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        let (all, of_caller) = (Arc::new(Semaphore::new(config.max_event_streams)), config.max_event_streams_per_caller);
        Arc::new(Self { all, of_caller, taken: Mutex::default() })
    }

    /// A place for a caller, at once or not at all.
    ///
    /// # Errors
    /// `rate_limited` if the caller has as many as it may, `overloaded` if all are taken.
    pub(crate) fn take(self: &Arc<Self>, caller: &Caller, address: Option<IpAddr>) -> Result<Place, ApiError> {
        let refused = |code, detail: String| ApiError::new(code, detail).with_retry_after(TRY_AGAIN);
        let key = Key::of(caller, address);
        let mut taken = self.taken.lock();
        let count = key.as_ref().and_then(|key| taken.get(key).copied()).unwrap_or(0);
        if let Some(key) = key.as_ref().filter(|_| count >= self.of_caller) {
            let detail = format!("max-event-streams-per-caller clients follow events already {}; end one, or try again later", key.words());
            return Err(refused(ErrorCode::RateLimited, detail));
        }
        let permit = Arc::clone(&self.all).try_acquire_owned().map_err(|_| {
            refused(ErrorCode::Overloaded, "max-event-streams clients follow events already; try again in a moment".to_owned())
        })?;
        if let Some(key) = &key {
            taken.insert(key.clone(), count + 1);
        }
        Ok(Place { places: Arc::clone(self), key, _permit: permit })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(key) = &self.key else { return };
        let mut taken = self.places.taken.lock();
        match taken.get_mut(key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                taken.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(all: usize, of_caller: usize) -> Arc<Places> {
        Places::new(&Config { max_event_streams: all, max_event_streams_per_caller: of_caller, ..Config::default() })
    }

    fn address(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn one_caller_has_its_share_and_leaves_the_rest_to_others() {
        let places = places(4, 2);
        let take = |from: &str| places.take(&Caller::Anyone, address(from));
        let held = [take("10.0.0.1").unwrap(), take("10.0.0.1").unwrap()];
        let refused = take("10.0.0.1").err().unwrap();
        assert_eq!((refused.code, refused.retry_after()), (ErrorCode::RateLimited, Some(TRY_AGAIN)));
        assert!(refused.detail.contains("from this address"), "{}", refused.detail);
        // A host with IPv6 has as many addresses as it likes.
        let other = [take("2001:db8::1").unwrap(), take("2001:db8::2").unwrap()];
        assert_eq!(take("2001:db8::3").err().unwrap().code, ErrorCode::RateLimited);
        assert_eq!(take("10.0.0.2").err().unwrap().code, ErrorCode::Overloaded, "all are taken");
        drop(other);
        assert_eq!(take("10.0.0.1").err().unwrap().code, ErrorCode::RateLimited);
        drop(held);
        assert!(places.taken.lock().is_empty(), "no caller is remembered without a stream");
        assert!(take("10.0.0.1").is_ok());
    }

    #[test]
    fn a_caller_that_is_not_known_takes_only_of_all() {
        let places = places(2, 1);
        let held = [places.take(&Caller::Anyone, None).unwrap(), places.take(&Caller::Anyone, None).unwrap()];
        assert_eq!(places.take(&Caller::Anyone, None).err().unwrap().code, ErrorCode::Overloaded);
        drop(held);
        assert!(places.take(&Caller::Anyone, None).is_ok());
    }
}
