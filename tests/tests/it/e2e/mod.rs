//! End to end, through the real binaries. One binary with a module for each theme: it links once.

mod concurrency;
mod crash;
mod dedup;
mod lock;
mod machine;
mod memory;
mod network;
mod refusals;
mod storage_full;
mod wire;
