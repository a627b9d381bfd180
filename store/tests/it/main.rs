//! The store, against every kind of metadata and of storage.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop and say where")]

#[macro_use]
mod common;
mod access;
mod agents;
mod audit_log;
mod catalogue;
mod clock;
mod codecs;
mod contention;
mod deferred;
mod domains;
mod encryption;
mod events;
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
mod oci;
mod opened;
mod parts;
mod postgres;
mod quarantine;
mod queue;
mod quota;
mod rebuild;
mod retention;
mod room;
mod signing;
mod slow;
mod stats;
mod summaries;
mod tasks;
mod vanished;
