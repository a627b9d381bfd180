//! The store, against every kind of metadata and of storage.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop and say where")]

#[macro_use]
mod common;
mod summaries;
mod clock;
mod contention;
mod domains;
mod faults;
mod freeing;
mod gc;
mod ingest;
mod integrity;
mod journal;
mod leases;
mod lifecycle;
mod lineage;
mod matching;
mod merging;
mod metadata;
mod deferred;
mod postgres;
mod quarantine;
mod queue;
mod rebuild;
mod room;
mod slow;
mod stats;
mod tasks;
mod vanished;
