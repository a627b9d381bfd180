//! Restores: a file is laid out, filled, handed to the server, and the slot is saved once more to
//! compare what it holds.

use super::file::StateFile;
use super::folder::Name;
use super::{Llama, Silent, Turn, compare, groups};
use crate::copies::room;
use crate::engines::{Attached, Engine};
use crate::error::{Error, Result, blocking};
use crate::memory::PageMemory;
use pfr_schema::llama::{Head, State, parse};
use pfr_schema::{Digest, ErrorCode, Limits};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A file for a slot, to be filled. Dropping it deletes the file.
#[derive(Debug)]
pub(crate) struct LaidOut {
    llama: Arc<Llama>,
    slot: u32,
    file: Arc<StateFile>,
    name: Name,
    /// The file is memory of the engine while these live.
    _member: Attached,
    _turn: Turn,
}

impl Llama {
    /// Lets the server say which model it runs.
    pub async fn begin_restore(self: &Arc<Self>) -> Result<Turn> {
        let turn = self.take("a restore")?;
        self.identify(&turn).await?;
        Ok(turn)
    }

    /// Lays out the file that has this head, for a slot. Returns the engine with that memory, and
    /// the blocks to fill.
    pub async fn lay_out(
        self: &Arc<Self>,
        turn: Turn,
        slot: Option<&str>,
        head: &[u8],
    ) -> Result<(Engine, BTreeMap<String, Vec<u32>>, LaidOut)> {
        let state = parse(&mut Head(head), &Limits::default())?;
        let slot = self.to_restore(&self.http.props().await?, slot).await?;
        let folder = self.folder.path();
        room(folder, state.bytes)?;
        let name = self.folder.name();
        let io = || Error::io(format!("state file in {}", folder.display()));
        let file = name.create().map_err(io())?;
        file.set_len(state.bytes).map_err(io())?;
        let file = Arc::new(StateFile::new(file, state, false, self.ring.clone()).map_err(io())?);
        let register = groups::slot(self.name(), &self.deployment().0, &file);
        let blocks = groups::blocks(&register);
        let memory: Arc<dyn PageMemory> = Arc::clone(&file) as Arc<dyn PageMemory>;
        let member = self.engines.attach(register, vec![memory], Arc::new(Silent))?;
        let engine = self.engines.get(self.name())?;
        Ok((engine, blocks, LaidOut { llama: Arc::clone(self), slot, file, name, _member: member, _turn: turn }))
    }
}

impl LaidOut {
    /// Hands the filled file to the server, if it is the one that was saved. Returns the slot.
    pub async fn activate(self, saved: &Digest) -> Result<String> {
        let Self { llama, slot, file, name, .. } = &self;
        let read = Arc::clone(file);
        let found = blocking("reading a state file", move || read.digest().map_err(Error::io("state file: read"))).await?;
        if found != *saved {
            let (expected, found) = (saved.to_string(), found.to_string());
            return Err(Error::Live { what: "the state file".into(), expected, found });
        }
        if let Err(error) = llama.http.restore(*slot, name, file.state.bytes).await {
            return Err(llama.explain(error, *slot, &file.state).await);
        }
        llama.unchanged().await?;
        let (expected, again) = (Arc::clone(file), llama.save(*slot).await?);
        let compare = move || compare::difference(&expected, &again).map_err(Error::io("state file: compare"));
        if let Some(difference) = blocking("comparing a slot", compare).await? {
            return Err(Error::SlotDiffers { engine: llama.name().into(), slot: *slot, difference });
        }
        llama.note(*slot, &file.state.tokens, file.state.boundary);
        Ok(slot.to_string())
    }
}

impl Llama {
    /// The server refuses a state without a reason, and empties the slot. So the slot computes one
    /// token: its file tells the form of the server's cache.
    async fn explain(&self, error: Error, slot: u32, state: &State) -> Error {
        let (Error::Refused { .. }, Some(token)) = (&error, state.tokens.first()) else { return error };
        let probe = async {
            self.http.compute(slot, *token).await?;
            self.save(slot).await
        };
        let probed = probe.await;
        // An empty slot is what a refused restore leaves.
        if let Err(error) = self.http.erase(slot).await {
            tracing::debug!(engine = self.name(), slot, %error, "slot not emptied after a refused restore");
        }
        match probed.map(|file| file.state.form()) {
            Ok(form) if form != state.form() => {
                Error::mismatch(ErrorCode::GeometryMismatch, format!("cache of engine {:?}", self.name()), form, state.form())
            }
            _ => error,
        }
    }
}
