//! Checks of the sequences, blocks and logits that an engine reports.

use super::layout::Group;
use pfr_schema::engine::{Oracle, Sequence};
use std::collections::{BTreeMap, HashSet};

/// What blocks are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Blocks to be read. Sequences may share a block; one sequence lists a block once.
    Capture,
    /// Blocks to be written. No block is in two columns.
    Fill,
}

pub(super) fn check(groups: &[Group], sequence: &Sequence) -> Result<(), String> {
    if sequence.id.is_empty() || sequence.id.len() > 200 {
        return Err("its name has 1 to 200 bytes".into());
    }
    if sequence.boundary > sequence.tokens.len() as u64 {
        return Err(format!("state for {} tokens, but only {} tokens", sequence.boundary, sequence.tokens.len()));
    }
    check_blocks(groups, sequence.boundary, &sequence.blocks, Use::Capture)
}

pub(super) fn check_blocks(groups: &[Group], boundary: u64, blocks: &BTreeMap<String, Vec<u32>>, purpose: Use) -> Result<(), String> {
    if let Some(unknown) = blocks.keys().find(|name| groups.iter().all(|g| g.layout.name != **name)) {
        return Err(format!("blocks of group {unknown:?}, which was not registered"));
    }
    for group in groups {
        let layout = &group.layout;
        let name = &layout.name;
        let Some(columns) = blocks.get(name) else {
            if layout.required {
                return Err(format!("no blocks of group {name:?}"));
            }
            continue;
        };
        let expected = group.all_columns(boundary);
        if columns.len() as u64 != expected {
            return Err(format!("{} blocks of group {name:?}, {expected} expected for {boundary} tokens", columns.len()));
        }
        let needed = group.columns(boundary);
        let mut seen = HashSet::new();
        for (column, block) in columns.iter().enumerate() {
            let is_null = layout.null_block == Some(*block);
            let is_needed = needed.contains(&(column as u64));
            if is_null && is_needed {
                return Err(format!("column {column} of group {name:?} is the null block"));
            }
            if *block >= layout.blocks {
                return Err(format!("block {block} of group {name:?}, which has {}", layout.blocks));
            }
            let once = is_needed || purpose == Use::Fill;
            if once && !is_null && !seen.insert(*block) {
                return Err(format!("block {block} of group {name:?} twice"));
            }
        }
    }
    Ok(())
}

pub(super) fn check_oracle(oracle: &Oracle, boundary: u64, top: u32) -> Result<(), String> {
    if oracle.boundary != boundary {
        return Err(format!("logits of the step at {}, asked for {boundary}", oracle.boundary));
    }
    if oracle.top.len() > top as usize {
        return Err(format!("{} logits, asked for {top}", oracle.top.len()));
    }
    let falling = |pair: &[(u32, u32)]| {
        let (one, two) = (f32::from_bits(pair[0].1), f32::from_bits(pair[1].1));
        one > two || (one == two && pair[0].0 < pair[1].0)
    };
    if oracle.top.iter().any(|(_, bits)| f32::from_bits(*bits).is_nan()) || !oracle.top.windows(2).all(falling) {
        return Err("logits that are not sorted, the highest first".into());
    }
    Ok(())
}
