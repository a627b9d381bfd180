//! For Rust engines that link the agent: saves and loads that never make the engine's loop wait.
//!
//! An engine attaches with [`crate::engines::Engines::attach`].
//!
//! **Saves.** The engine hands sequences to a [`Saver`], each with a pin of its own kind. As long
//! as that value lives, the engine leaves the sequence's blocks (partly filled and recurrent ones
//! too) as they are. The pin is dropped when the bytes were copied and hashed, and whenever the
//! save fails, is refused, or is given up; never under a copy.
//!
//! **Loads.** A [`Loader`] pulls and proves a snapshot, and says what it is
//! ([`LoadState::Staged`]); the engine takes blocks for it and hands them over with [`Load::fill`]
//! and a guard of its own type. While that value lives, the engine does not reuse the blocks. It is
//! dropped before [`Load::poll`] says [`LoadState::Filled`] or [`LoadState::Failed`]; never under a
//! copy. Only after [`LoadState::Filled`] may the sequence run: its pages were hashed in place by
//! then. To keep the blocks, the engine keeps a guard of its own (for example a clone of an `Arc`).

mod load;
mod save;

pub use load::{Destination, Load, LoadRequest, LoadState, Loader, Ready};
pub use save::{Refusal, Save, SaveState, Saver, Ticket};
