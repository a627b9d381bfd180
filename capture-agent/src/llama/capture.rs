//! Captures: a slot is saved, and its file is read where it lies.

use super::file::{OnDisk, StateFile};
use super::{Llama, Silent, Turn, groups};
use crate::copies::SharedPin;
use crate::engines::Engine;
use crate::error::{Error, Result, blocking};
use crate::memory::PageMemory;
use pfr_schema::engine::Sequence;
use pfr_schema::llama::{Head, parse};
use pfr_schema::{Digest, Limits, prefix};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Free bytes below which a file system counts as full.
const FULL: u64 = 1 << 20;

/// A slot whose state lies in a file, until the pin is dropped.
#[derive(Debug)]
pub(crate) struct Saved {
    pub engine: Engine,
    pub sequence: Sequence,
    pub pin: SharedPin,
    /// Of the file.
    pub digest: Digest,
    /// How long the server wrote: it computes nothing meanwhile.
    pub wrote: Duration,
}

impl Llama {
    /// Saves a slot.
    pub async fn capture(&self, turn: Turn, slot: Option<&str>) -> Result<Saved> {
        let props = self.identify(&turn).await?;
        let slot = self.to_capture(&props, slot).await?;
        let began = Instant::now();
        let file = self.save(slot).await?;
        let wrote = began.elapsed();
        self.unchanged().await?;
        if file.state.boundary == 0 {
            return Err(Error::Invalid(format!("slot {slot} of engine {:?} has no state yet", self.name())));
        }
        let checked = blocking("reading a state file", move || {
            let io = |what: &'static str| Error::io(format!("state file: {what}"));
            // A restore lays the file out from the head, so the head must say all.
            let head = file.head().map_err(io("read"))?;
            if parse(&mut Head(&head), &Limits::default())? != file.state {
                return Err(Error::Internal("a state file and its head are read differently".into()));
            }
            let digest = file.digest().map_err(io("read"))?;
            Ok::<_, Error>((file, digest))
        });
        let (file, digest) = checked.await?;
        let (deployment, fingerprint) = self.deployment();
        let register = groups::slot(self.name(), &deployment, &file);
        let sequence = groups::sequence(slot, &file, &register);
        let memory: Arc<dyn PageMemory> = Arc::new(file);
        let member = self.engines.attach(register, vec![memory], Arc::new(Silent))?;
        let engine = self.engines.get(self.name())?;
        self.continue_from(&engine, slot, &sequence, &fingerprint);
        Ok(Saved { engine, sequence, pin: SharedPin::new(Box::new((member, turn))), digest, wrote })
    }

    /// A slot takes one conversation after another: its state of before is the parent of
    /// its state of now only if it is a prefix of it.
    fn continue_from(&self, engine: &Engine, slot: u32, sequence: &Sequence, fingerprint: &Digest) {
        let key = |length: u64| {
            let tokens = sequence.tokens.get(..usize::try_from(length).unwrap_or(usize::MAX))?;
            Some(prefix::key(fingerprint, "", None, tokens))
        };
        let before = self.known.lock().prefixes.get(&slot).copied();
        if before.is_some_and(|(length, before)| key(length) != Some(before)) {
            engine.forget_parent(&sequence.id);
        }
        self.note(slot, &sequence.tokens, sequence.boundary);
    }

    /// Remembers the prefix of a slot.
    pub(super) fn note(&self, slot: u32, tokens: &[u32], boundary: u64) {
        let (_, fingerprint) = self.deployment();
        let computed = &tokens[..usize::try_from(boundary).unwrap_or(usize::MAX).min(tokens.len())];
        let key = prefix::key(&fingerprint, "", None, computed);
        self.known.lock().prefixes.insert(slot, (computed.len() as u64, key));
    }

    /// Lets the server save a slot, and opens the file. From then on the file has no name, so
    /// nothing else can change it, and nothing of it is left however this ends.
    pub(super) async fn save(&self, slot: u32) -> Result<StateFile> {
        let name = self.folder.name();
        let full = |bytes: u64| {
            let free = rustix::fs::statvfs(self.folder.path()).map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
            let what = format!("llama-server saved {bytes} bytes of slot {slot} in {}", self.folder.path().display());
            (free < FULL).then(|| Error::io(what)(ErrorKind::StorageFull.into()))
        };
        let wrote = match self.http.save(slot, &name).await {
            Err(error @ Error::Refused { .. }) => return Err(full(name.bytes()).unwrap_or(error)),
            other => other?,
        };
        let file = name.open().map_err(|error| {
            let folder = self.folder.path().display();
            let hint = if error.kind() == ErrorKind::NotFound { "; is this the server's --slot-save-path?" } else { "" };
            Error::io(format!("state file that llama-server at {} saved into {folder}{hint}", self.http.url()))(error)
        })?;
        let bytes = file.metadata().map_err(Error::io("size of a state file"))?.len();
        if bytes != wrote || bytes == 0 {
            let reason = format!("llama-server saved {bytes} bytes of slot {slot} and says that it wrote {wrote}");
            return Err(full(bytes).unwrap_or(Error::Protocol { engine: self.name().into(), reason }));
        }
        drop(name);
        let ring = self.ring.clone();
        let file = blocking("reading a state file", move || {
            let state = parse(&mut OnDisk { file: &file, bytes }, &Limits::default())?;
            StateFile::new(file, state, true, ring).map_err(Error::io("state file: status"))
        })
        .await?;
        if let Some(token_bytes) = file.state.bytes.checked_div(file.state.boundary) {
            self.known.lock().token_bytes = token_bytes;
        }
        Ok(file)
    }
}
