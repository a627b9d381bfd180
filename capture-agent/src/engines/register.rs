//! Checks of a registration: afterwards no block of any part can lie outside of its memory.

use crate::error::{Error, Result, cuda_handle};
use pfr_schema::checkpoint::{Dtype, Layout, MAX_RANK};
use pfr_schema::engine::{GroupLayout, MAX_DESCRIPTORS, Memory, MemoryKind, PROTOCOL, Part, Register, State};
use pfr_schema::tree::{GroupKind, OPAQUE_PREFIX};
use pfr_schema::{Limits, flat};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};

/// Most ranks of an engine.
const MAX_WORLD: u32 = 4096;
/// Most groups of a member.
const MAX_GROUPS: usize = 64;
/// Most parts and states of a member.
const MAX_PARTS: usize = 64 << 10;
/// Most keys that say how ranks share the state.
const MAX_PARALLEL: usize = 16;
/// Most bytes of a deployment as JSON.
const MAX_DEPLOYMENT: usize = 64 << 10;

/// Checks everything that does not need the memory itself.
pub(super) fn check(register: &Register) -> Result<()> {
    let broke = |reason: String| {
        let engine = register.engine.chars().take(64).collect();
        Error::Protocol { engine, reason: format!("registration: {reason}") }
    };
    check_names(register).map_err(broke)?;
    check_deployment(&register.deployment).map_err(broke)?;
    check_parallel(register).map_err(broke)?;
    let memories = check_memories(&register.memories).map_err(broke)?;
    check_groups(&register.groups, &memories).map_err(broke)
}

type Check<T = ()> = std::result::Result<T, String>;

fn ensure(holds: bool, reason: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(reason()) }
}

fn check_name(what: &str, name: &str) -> Check {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    ensure((1..=64).contains(&name.len()) && name.chars().all(legal), || {
        let found: String = name.chars().take(70).collect();
        format!("the {what}'s name is 1 to 64 letters, digits, '.', '_' or '-', found {found:?}")
    })
}

fn check_names(register: &Register) -> Check {
    ensure(register.protocol == PROTOCOL, || format!("protocol {PROTOCOL} is spoken here, found {}", register.protocol))?;
    check_name("engine", &register.engine)?;
    check_name("member", &register.member)?;
    ensure((1..=MAX_WORLD).contains(&register.world), || format!("1 to {MAX_WORLD} ranks, found {}", register.world))?;
    ensure(register.rank < register.world, || format!("rank {} of {}", register.rank, register.world))?;
    ensure(!(register.verbs.is_empty() && register.groups.is_empty()), || "it serves nothing and has no memory".into())
}

fn check_deployment(deployment: &BTreeMap<String, Value>) -> Check {
    for key in ["weights", "engine", "backend"] {
        let given = matches!(deployment.get(key), Some(Value::String(text)) if !text.is_empty());
        ensure(given, || format!("the deployment's {key:?} is a text, found {:?}", deployment.get(key)))?;
    }
    let scalar = |value: &Value| match value {
        Value::String(_) | Value::Bool(_) => true,
        Value::Number(number) => number.is_u64() || number.is_i64(),
        _ => false,
    };
    for (key, value) in deployment {
        let legal = scalar(value) || value.as_array().is_some_and(|list| list.iter().all(scalar));
        ensure(legal, || format!("the deployment's {key:?} is a text, integer, boolean or list of these"))?;
    }
    let bytes = serde_json::to_vec(deployment).map_or(usize::MAX, |json| json.len());
    ensure(bytes <= MAX_DEPLOYMENT, || format!("a deployment of {bytes} bytes, the limit is {MAX_DEPLOYMENT}"))
}

/// Numbers only, so that no digest of weights can be named here.
fn check_parallel(register: &Register) -> Check {
    let is_number = |key: &&String| register.deployment.get(*key).is_some_and(Value::is_u64);
    ensure(register.parallel.len() <= MAX_PARALLEL && register.parallel.iter().all(|key| is_number(&key)), || {
        format!("at most {MAX_PARALLEL} keys of numbers in the deployment say how ranks share the state, found {:?}", register.parallel)
    })
}

fn check_memories(memories: &[Memory]) -> Check<BTreeMap<&str, u64>> {
    ensure(memories.len() <= MAX_DESCRIPTORS, || format!("{} memories, the limit is {MAX_DESCRIPTORS}", memories.len()))?;
    let mut sizes = BTreeMap::new();
    for memory in memories {
        let name = memory.name.as_str();
        check_name("memory", name)?;
        ensure(memory.bytes > 0 && memory.offset.checked_add(memory.bytes).is_some(), || {
            format!("memory {name:?}: {} bytes from {}", memory.bytes, memory.offset)
        })?;
        let handle = memory.handle.as_deref().and_then(cuda_handle).is_some();
        match memory.kind {
            MemoryKind::CudaIpc => ensure(handle, || format!("memory {name:?}: a CUDA IPC handle is 64 bytes in hex"))?,
            MemoryKind::CudaVmm | MemoryKind::PosixShm => {
                ensure(memory.handle.is_none(), || format!("memory {name:?}: only CUDA IPC has a handle"))?
            }
        }
        let on_device = memory.kind != MemoryKind::PosixShm;
        ensure(memory.device.is_some() == on_device, || format!("memory {name:?}: a GPU is named exactly for CUDA memory"))?;
        ensure(sizes.insert(name, memory.bytes).is_none(), || format!("memory {name:?} twice"))?;
    }
    Ok(sizes)
}

fn check_groups(groups: &[GroupLayout], memories: &BTreeMap<&str, u64>) -> Check {
    ensure(groups.len() <= MAX_GROUPS, || format!("{} groups, the limit is {MAX_GROUPS}", groups.len()))?;
    let parts: usize = groups.iter().map(|g| g.states.len() + g.components.iter().map(|c| c.parts.len()).sum::<usize>()).sum();
    ensure(parts <= MAX_PARTS, || format!("{parts} parts, the limit is {MAX_PARTS}"))?;
    let (mut names, mut states) = (HashSet::new(), HashSet::new());
    for group in groups {
        let name = &group.name;
        ensure((1..=200).contains(&name.len()), || format!("a group's name has 1 to 200 bytes, found {}", name.len()))?;
        let inside = |reason: String| format!("group {name:?}: {reason}");
        ensure(names.insert(name), || inside("twice".into()))?;
        for state in &group.states {
            ensure(states.insert(&state.name), || inside(format!("state {:?} twice", state.name)))?;
        }
        check_group(group, memories).map_err(inside)?;
    }
    Ok(())
}

fn check_group(group: &GroupLayout, memories: &BTreeMap<&str, u64>) -> Check {
    ensure(group.block_tokens > 0 && group.blocks > 0, || format!("{} blocks of {} tokens", group.blocks, group.block_tokens))?;
    ensure(group.uncut.as_ref().is_none_or(|reason| reason.len() <= 200), || "a reason of more than 200 bytes".into())?;
    ensure(group.null_block.is_none_or(|null| null < group.blocks), || format!("null block {:?} of {}", group.null_block, group.blocks))?;
    let windowed = group.kind == GroupKind::SlidingWindow;
    ensure(group.window.is_some_and(|window| window > 0) == windowed && group.window.is_some() == windowed, || {
        format!("a window, of 1 token or more, is given exactly for a sliding window, found {:?}", group.window)
    })?;
    if group.kind == GroupKind::Recurrent {
        ensure(!group.states.is_empty() && group.components.is_empty(), || "a recurrent group has states and no components".into())?;
        ensure(group.block_tokens == 1, || format!("a recurrent group has 1 token a block, found {}", group.block_tokens))?;
        ensure(group.geometry.is_none(), || "a recurrent group has no geometry".into())?;
        return group
            .states
            .iter()
            .try_for_each(|s| check_state(s, group.blocks, memories).map_err(|e| format!("state {:?}: {e}", s.name)));
    }
    ensure(group.states.is_empty(), || "only a recurrent group has states".into())?;
    check_components(group, memories)
}

fn check_components(group: &GroupLayout, memories: &BTreeMap<&str, u64>) -> Check {
    let limits = Limits::default();
    let names: Vec<&str> = group.components.iter().map(|c| c.name.as_str()).collect();
    ensure(matches!(names[..], ["k", "v"] | ["kv"] | ["latent"]), || {
        format!(r#"components are ["k","v"], ["kv"] or ["latent"], found {} of them"#, names.len())
    })?;
    let mut sizes = Vec::new();
    for component in &group.components {
        let name = &component.name;
        ensure(!component.parts.is_empty(), || format!("component {name:?} has no parts"))?;
        ensure(component.parts.iter().all(|p| p.memory == component.parts[0].memory), || {
            format!("component {name:?} lies in two memories")
        })?;
        let mut layers = HashSet::new();
        let mut named = component.parts.iter().filter_map(|part| part.share.as_ref());
        ensure(named.all(|share| layers.insert(&share.layer)), || format!("component {name:?} has a layer twice"))?;
        component.parts.iter().try_for_each(|p| check_part(p, group.blocks, memories).map_err(|e| format!("component {name:?}: {e}")))?;
        sizes.push(component.parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.bytes)));
    }
    let bytes = sizes[0];
    ensure(sizes.iter().all(|size| *size == bytes), || format!("components of different sizes: {sizes:?}"))?;
    ensure(bytes <= limits.page_bytes, || format!("pages of {bytes} bytes, the limit is {}", limits.page_bytes))?;
    let Some(geometry) = group.geometry else {
        return ensure(group.layout.starts_with(OPAQUE_PREFIX) && group.layout.len() <= 200, || {
            let found: String = group.layout.chars().take(70).collect();
            format!("a layout without a geometry starts with {OPAQUE_PREFIX:?} and has 200 bytes at most, found {found:?}")
        });
    };
    ensure(group.layout == flat::LAYOUT, || format!("only layout {:?} has a geometry", flat::LAYOUT))?;
    ensure(names.len() == 2, || format!(r#"layout {:?} has components ["k","v"]"#, flat::LAYOUT))?;
    let expected = geometry.page_bytes(&limits).map_err(|e| e.to_string())?;
    ensure(bytes == expected, || format!("pages of {bytes} bytes, the geometry says {expected}"))?;
    ensure(geometry.page_size_tokens == group.block_tokens, || {
        format!("blocks of {} tokens, the geometry says {}", group.block_tokens, geometry.page_size_tokens)
    })
}

fn check_part(part: &Part, blocks: u32, memories: &BTreeMap<&str, u64>) -> Check {
    let Some(size) = memories.get(part.memory.as_str()) else {
        let found: String = part.memory.chars().take(70).collect();
        return Err(format!("no memory {found:?}"));
    };
    ensure(part.bytes > 0, || "a part of 0 bytes".into())?;
    ensure(blocks == 1 || part.block_stride >= part.bytes, || {
        format!("blocks overlap: {} bytes, {} from one to the next", part.bytes, part.block_stride)
    })?;
    let end = u128::from(part.offset) + u128::from(blocks - 1) * u128::from(part.block_stride) + u128::from(part.bytes);
    ensure(end <= u128::from(*size), || format!("block {} ends at byte {end} of memory {:?}, which has {size}", blocks - 1, part.memory))?;
    let Some(share) = &part.share else { return Ok(()) };
    let bytes = share.check()?;
    ensure(bytes == part.bytes, || format!("the share of layer {:?} has {bytes} bytes, the part {}", share.layer, part.bytes))
}

fn check_state(state: &State, blocks: u32, memories: &BTreeMap<&str, u64>) -> Check {
    ensure((1..=200).contains(&state.name.len()), || "a name of 1 to 200 bytes".into())?;
    const KINDS: [&str; 7] = ["recurrent", "conv", "ssm", "window", "mtp", "last-hidden", "rng"];
    let known = KINDS.contains(&state.kind.as_str()) || state.kind.strip_prefix("other:").is_some_and(|name| !name.is_empty());
    ensure(known && state.kind.len() <= 200, || "its kind is recurrent, conv, ssm, window, mtp, last-hidden, rng or other:<name>".into())?;
    check_part(&state.part, blocks, memories)?;
    ensure(state.part.share.is_none(), || "the share of a state is along a dimension, not of its part".into())?;
    if let Some(share) = &state.share {
        share.share.check()?;
        let (units, dimension) = (share.share.units(), state.shape.get(share.axis as usize));
        ensure(dimension == Some(&units), || format!("a share of {units} units along dimension {} of {:?}", share.axis, state.shape))?;
    }
    let dtype = |name: &str| name.parse::<Dtype>().map_err(|e| e.to_string());
    dtype(&state.logical_dtype)?;
    check_layout(&state.layout, &state.shape, dtype(&state.storage_dtype)?, state.part.bytes)
}

/// Every element of an affine layout lies in the block.
fn check_layout(layout: &Layout, shape: &[u64], storage: Dtype, bytes: u64) -> Check {
    ensure((1..=200).contains(&layout.tag.len()), || "a layout's tag has 1 to 200 bytes".into())?;
    ensure(shape.len() <= MAX_RANK, || format!("{} dimensions, the limit is {MAX_RANK}", shape.len()))?;
    ensure(!shape.contains(&0), || "a dimension of 0".into())?;
    let Some(strides) = &layout.strides else {
        return ensure(layout.offset.is_none(), || "an opaque layout has no offset".into());
    };
    ensure(strides.len() == shape.len(), || format!("{} strides for {} dimensions", strides.len(), shape.len()))?;
    let start = i128::from(layout.offset.unwrap_or(0));
    let (mut low, mut high) = (start, start);
    for (dimension, stride) in shape.iter().zip(strides) {
        // Both have 64 bits, so the product has at most 127.
        let reach = i128::from(dimension - 1).saturating_mul(i128::from(*stride));
        if reach < 0 { low = low.saturating_add(reach) } else { high = high.saturating_add(reach) }
    }
    let needed = high.max(0).unsigned_abs().saturating_add(1).saturating_mul(storage.bytes() as u128);
    ensure(low >= 0 && needed <= u128::from(bytes), || format!("elements from {low} to {high} do not lie in {bytes} bytes"))
}
