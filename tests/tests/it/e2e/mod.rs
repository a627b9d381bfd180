//! End-to-end tests through the real programs. All are modules of one test binary, so that it links
//! only once.

mod concurrency;
mod crash;
mod dedup;
mod herd;
mod lock;
mod machine;
mod memory;
mod network;
mod oci;
mod refusals;
mod storage_full;
mod wire;
