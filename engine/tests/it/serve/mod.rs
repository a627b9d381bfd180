//! The serving engine as a process, against an agent that speaks the protocol and does nothing
//! else.

mod agent;
mod calls;
mod lifecycle;
mod process;
mod restore;
