//! Loops that touch every byte of a page, in the instructions of each processor.
//!
//! A crate of its own, since it must be optimized in every build: the formats around it need not
//! be. A *kernel* is one such loop for one kind of instructions. Which of them a processor has is
//! found out at run time, and all of them give the same bytes.

pub mod bitmaps;
pub mod planes;
pub mod sha256;
