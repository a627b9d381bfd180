//! What copies into and out of an engine's memory keep to: when they may begin, when all have
//! ended, what they hold meanwhile.
//!
//! Captures and restores make the copies, and engines take their blocks back. This module knows
//! none of them.

mod claims;
mod fills;
mod gate;
mod room;
mod shared_pin;
mod turns;

pub(crate) use claims::Claims;
pub(crate) use fills::Fills;
pub(crate) use gate::Gate;
pub(crate) use room::{Room, room};
pub(crate) use shared_pin::SharedPin;
pub(crate) use turns::{Turn, Turns};
