//! Code that all programs of `pf` share.
//!
//! | module | for | feature |
//! |---|---|---|
//! | [`durable`] | files and folders that survive a power cut | |
//! | [`backoff`] | waits between two attempts | |
//! | [`few`] | lists of names in messages | |
//! | [`buffers`] | memory that is used again | |
//! | [`memory`] | memory that slow senders share | |
//! | [`units`] | sizes and numbers in messages | |
//! | [`task`] | tasks of the runtime | |
//! | [`Shared`] | values that many futures hold | |
//! | [`settings`] | settings from flags, environment and a file | `program` |
//! | [`secret`] | tokens and passwords that cannot be printed | `program` |
//! | [`user_dirs`] | the folders of the user | `program` |
//! | [`lock`] | locks that another process may hold | `program` |
//! | [`log`] | the log on standard error | `program` |
//! | [`traces`] | spans, exported to a collector | `program` |
//! | [`signals`] | the signals that end a program, or have it read its files again | `program` |
//! | [`problem`] | errors as `application/problem+json` | `http` |
//! | [`metrics`] | the recorder behind `/metrics` | `http` |
//!
//! The store is below the programs and needs those without a feature only, so the rest hides behind
//! features: `docs/decisions/0026-one-crate-for-what-programs-share.md`.

pub mod backoff;
pub mod buffers;
pub mod durable;
mod few;
#[cfg(feature = "program")]
pub mod lock;
#[cfg(feature = "program")]
pub mod log;
pub mod memory;
#[cfg(feature = "http")]
pub mod metrics;
#[cfg(feature = "http")]
pub mod problem;
#[cfg(feature = "program")]
pub mod secret;
#[cfg(feature = "program")]
pub mod settings;
mod shared;
#[cfg(feature = "program")]
pub mod signals;
pub mod task;
#[cfg(feature = "program")]
pub mod traces;
pub mod units;
#[cfg(feature = "program")]
pub mod user_dirs;

pub use backoff::Backoff;
pub use few::few;
#[cfg(feature = "program")]
pub use log::LogFormat;
#[cfg(feature = "program")]
pub use secret::{Secret, SecretUrl};
pub use shared::Shared;
#[cfg(feature = "program")]
pub use user_dirs::UserDirs;
