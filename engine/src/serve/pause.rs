//! A pause: its name, when it ends by itself, and how the last one ended.

use pfr_schema::engine::PauseRequest;
use std::time::{Duration, Instant};

/// Whether the engine is paused.
#[derive(Debug, Default)]
pub(super) struct Pause {
    current: Option<Current>,
    /// The pause that was ended last by a call of its name: the call may be repeated.
    held: Option<String>,
}

#[derive(Debug)]
struct Current {
    name: String,
    until: Option<Instant>,
}

impl Pause {
    pub fn is_on(&self) -> bool {
        self.current.is_some()
    }

    /// Begins a pause, in place of another. Returns whether the engine ran until now.
    pub fn begin(&mut self, PauseRequest { pause, limit_ms }: PauseRequest, now: Instant) -> bool {
        let until = if limit_ms == 0 { None } else { now.checked_add(Duration::from_millis(limit_ms)) };
        self.current.replace(Current { name: pause, until }).is_none()
    }

    /// Ends the pause of this name. Returns whether it held until a call ended it.
    pub fn end(&mut self, name: &str) -> bool {
        if self.current.take_if(|current| current.name == name).is_some() {
            self.held = Some(name.to_owned());
        }
        self.held.as_deref() == Some(name)
    }

    /// Ends any pause. Returns whether there was one.
    pub fn stop(&mut self) -> bool {
        self.current.take().is_some()
    }

    /// When it ends by itself.
    pub fn until(&self) -> Option<Instant> {
        self.current.as_ref()?.until
    }

    /// Ends a pause that has lasted too long. Returns whether it did.
    pub fn expire(&mut self, now: Instant) -> bool {
        self.current.take_if(|current| current.until.is_some_and(|until| until <= now)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pause: &str, limit_ms: u64) -> PauseRequest {
        PauseRequest { pause: pause.into(), limit_ms }
    }

    #[test]
    fn only_a_pause_that_a_call_of_its_name_ended_has_held() {
        let (mut pause, now) = (Pause::default(), Instant::now());
        assert!(!pause.end("a"), "there was none");
        assert!(pause.begin(request("a", 0), now));
        assert!(!pause.end("b") && pause.is_on(), "another one");
        assert!(pause.end("a") && !pause.is_on());
        assert!(pause.end("a"), "the same call again");
        assert!(pause.begin(request("b", 10), now) && !pause.expire(now));
        assert!(pause.expire(now + Duration::from_millis(10)) && !pause.is_on());
        assert!(!pause.end("b"), "it ended by itself");
        assert!(pause.begin(request("c", 0), now) && pause.stop() && !pause.end("c"));
    }
}
