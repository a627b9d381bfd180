//! The fields in which a snapshot's configuration and its checkpoints must agree.

use super::Key;
use crate::error::FormatError;
use crate::snapshot::{Descriptor, RANK, SnapshotConfig};
use std::collections::HashSet;

const DOCUMENT: &str = "snapshot";

/// The rank that a checkpoint layer belongs to: annotation [`RANK`], 0 without one.
///
/// # Errors
/// [`FormatError::Field`] if the annotation is not a decimal number without leading zeros.
pub fn rank(layer: &Descriptor) -> Result<u32, FormatError> {
    let Some(text) = layer.annotations.get(RANK) else { return Ok(0) };
    match text.parse::<u32>() {
        Ok(rank) if rank.to_string() == *text => Ok(rank),
        _ => Err(FormatError::field(DOCUMENT, format!("$.layers[?].annotations[{RANK:?}]"), "a rank", format!("{text:?}"))),
    }
}

/// Checks that a snapshot is of one prefix at one token position: `boundary`, `prefix` and the keys
/// of its checkpoints agree where they are present, and no rank has two checkpoints.
///
/// # Errors
/// [`FormatError::Field`] names the two values that disagree.
pub fn coherent(config: &SnapshotConfig, checkpoints: &[(u32, &Key)]) -> Result<(), FormatError> {
    let field = |path: &str, expected: String, found: String| Err(FormatError::field(DOCUMENT, path, expected, found));
    if let (Some(boundary), Some(prefix)) = (config.boundary, &config.prefix)
        && boundary != prefix.tokens
    {
        return field("config.boundary", format!("{}, as config.prefix.tokens", prefix.tokens), boundary.to_string());
    }
    let mut ranks = HashSet::new();
    let first = checkpoints.first().map(|(_, key)| *key);
    for (rank, key) in checkpoints {
        if !ranks.insert(rank) {
            return field("layers", "one checkpoint for each rank".into(), format!("a second one for rank {rank}"));
        }
        if let Some(boundary) = config.boundary
            && boundary != key.tokens
        {
            return field("checkpoint.key.tokens", format!("{boundary}, as config.boundary"), key.tokens.to_string());
        }
        let others = [("config.prefix", config.prefix.as_ref()), ("the key of the first checkpoint", first)];
        for (name, other) in others {
            if let Some(other) = other.filter(|other| other != key) {
                return field("checkpoint.key", format!("{}, as {name}", describe(other)), describe(key));
            }
        }
    }
    Ok(())
}

fn describe(key: &Key) -> String {
    let Key { scheme, prefix, tokens, alignment, salt, adapter } = key;
    format!("{scheme} {prefix} at {tokens} tokens (alignment {alignment}, salt {salt:?}, adapter {adapter:?})")
}
