//! The registry, over HTTP and as a program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod access;
mod agents;
mod audit;
mod claims;
mod codecs;
mod commands;
mod common;
mod conditions;
mod config;
mod domains;
mod encryption;
mod events;
mod gc;
mod integrity;
mod jwt;
mod limits;
mod logs;
mod matching;
mod metrics;
mod names;
mod oci;
mod openapi;
mod problems;
mod protocol;
mod quotas;
mod rates;
mod retention;
mod round_trip;
mod shutdown;
mod signing;
mod slow;
mod tasks;
mod tls;
mod tokens;
mod ui;
mod wire;
