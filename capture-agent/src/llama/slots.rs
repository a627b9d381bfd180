//! Which slot is meant.

use super::Llama;
use super::http::{Props, Slot};
use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// How often a busy slot is looked at.
const LOOK: Duration = Duration::from_millis(100);

impl Llama {
    /// The slot to capture: the named one, else the only one with tokens. Waits while a request
    /// runs in it, because the server saves between requests.
    pub(super) async fn to_capture(&self, props: &Props, slot: Option<&str>) -> Result<u32> {
        let slot = match slot {
            Some(name) => self.number(props, name)?,
            None => self.only(props, self.http.slots().await?)?,
        };
        self.idle(slot).await?;
        Ok(slot)
    }

    /// The slot to restore into: the named one, else one that is shown to be empty.
    pub(super) async fn to_restore(&self, props: &Props, slot: Option<&str>) -> Result<u32> {
        if let Some(name) = slot {
            let slot = self.number(props, name)?;
            self.idle(slot).await?;
            return Ok(slot);
        }
        let unknown = |id| Slot { id, busy: false, tokens: None };
        let slots = self.http.slots().await?.unwrap_or_else(|| (0..props.slots).map(unknown).collect());
        for slot in slots.iter().filter(|slot| !slot.busy && slot.tokens.is_none_or(|tokens| tokens == 0)) {
            // A state may have been restored into it since its last request.
            if self.save(slot.id).await.is_ok_and(|file| file.state.tokens.is_empty()) {
                return Ok(slot.id);
            }
        }
        let hint = "name the slot that may be overwritten with --sequence";
        Err(Error::Invalid(format!("engine {:?} has no idle, empty slot of {}; {hint}", self.name(), props.slots)))
    }

    /// Slots that have state, as far as it is known without saving them: slot, tokens, and bytes as
    /// in the last file. For a drain.
    pub async fn with_state(&self) -> Result<Vec<(u32, u64, u64)>> {
        let slots = self.http.slots().await?.unwrap_or_default();
        let known = self.known.lock();
        let tokens = |slot: &Slot| slot.tokens.or_else(|| known.prefixes.get(&slot.id).map(|(length, _)| *length));
        let found = slots.iter().filter_map(|slot| Some((slot.id, tokens(slot).filter(|tokens| *tokens > 0)?)));
        Ok(found.map(|(slot, tokens)| (slot, tokens, tokens * known.token_bytes)).collect())
    }

    fn number(&self, props: &Props, name: &str) -> Result<u32> {
        name.parse().ok().filter(|slot| *slot < props.slots).ok_or_else(|| self.unknown(props, name))
    }

    fn unknown(&self, props: &Props, slot: &str) -> Error {
        Error::SequenceUnknown {
            engine: self.name().into(),
            sequence: slot.into(),
            known: format!("slots 0 to {}", props.slots.max(1) - 1),
        }
    }

    fn only(&self, props: &Props, slots: Option<Vec<Slot>>) -> Result<u32> {
        if props.slots == 1 {
            return Ok(0);
        }
        let used: Vec<u32> =
            slots.iter().flatten().filter(|slot| slot.tokens.is_some_and(|tokens| tokens > 0)).map(|slot| slot.id).collect();
        match (&used[..], &slots) {
            ([slot], _) => Ok(*slot),
            ([], Some(_)) => Err(self.unknown(props, "")),
            _ => {
                let known: Vec<String> = used.iter().map(ToString::to_string).collect();
                let known = if known.is_empty() { format!("0 to {}", props.slots - 1) } else { known.join(", ") };
                Err(Error::SequenceAmbiguous { engine: self.name().into(), known })
            }
        }
    }

    /// Waits until no request runs in a slot.
    async fn idle(&self, slot: u32) -> Result<()> {
        let deadline = Instant::now() + self.http.timeout();
        loop {
            // A server that does not tell lets the save wait.
            let Some(slots) = self.http.slots().await? else { return Ok(()) };
            if !slots.iter().any(|other| other.id == slot && other.busy) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::Busy { engine: self.name().into(), with: format!("a request in slot {slot}") });
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
