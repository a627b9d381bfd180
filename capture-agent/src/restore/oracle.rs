//! The logits check: the first step after the restore must give the recorded logits.

use crate::engines::Engine;
use crate::error::{Error, Result};
use pfr_schema::engine::{Oracle, Verb};

/// Compares logits if the snapshot has them and the engine serves them. Returns whether they were
/// compared.
pub(super) async fn check(engine: &Engine, sequence: &str, recorded: Option<&Oracle>) -> Result<bool> {
    let Some(recorded) = recorded.filter(|_| engine.serves(Verb::Oracle)) else { return Ok(false) };
    let top = u32::try_from(recorded.top.len()).unwrap_or(u32::MAX);
    let found = engine.oracle(sequence, recorded.boundary, top).await?;
    let found = found.ok_or_else(|| Error::Oracle { detail: "the engine gives none".into() })?;
    let pairs = recorded.top.iter().zip(&found.top).enumerate();
    let difference = pairs.into_iter().find(|(_, (recorded, found))| recorded != found);
    if let Some((at, (recorded, found))) = difference {
        return Err(Error::Oracle { detail: format!("logit {at}: {} recorded, {} now", words(*recorded), words(*found)) });
    }
    if recorded.top.len() != found.top.len() {
        return Err(Error::Oracle { detail: format!("{} logits recorded, {} now", recorded.top.len(), found.top.len()) });
    }
    Ok(true)
}

fn words((token, bits): (u32, u32)) -> String {
    format!("token {token} with {} ({bits:#010x})", f32::from_bits(bits))
}
