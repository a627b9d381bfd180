//! Tests that nothing is lost and nothing leaks.
//!
//! Random histories of pushes, forks, deletions, collections, retention, crashes, power losses and
//! lost databases run over real stores, with a storage that forgets, calls that fail before and
//! after their effect, and a clock that jumps. An oracle knows what was acknowledged. Everything
//! follows from a seed. A failing history prints its seed, and is shortened to the shortest
//! beginning that fails.

pub mod case;
pub mod check;
pub mod disk;
pub mod domains;
pub mod events;
pub mod failing;
pub mod faults;
pub mod gate;
pub mod keyring;
pub mod names;
pub mod operations;
pub mod prefixes;
pub mod retention;
pub mod signing;
pub mod snapshots;
pub mod transactions;
pub mod world;
