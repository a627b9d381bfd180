//! The registry: a [`pfr_store::Store`] for each domain behind HTTP.
//!
//! ```text
//! main ─▶ config (flags, environment, file) ─▶ server (listener, connections, shutdown)
//!                                                 │
//! connection ─▶ http::handshake (TLS) ─▶ http::base (domain) ─▶ http::request (id, limits, panics, metrics, one log line) ─▶ routes
//!   ─▶ v1, oci, or a page of ui ─▶ auth::Access (the store of the domain)
//!                                                 │
//!                                              problem (every error, one shape)
//! ```
//!
//! It keeps no state of its own: every acknowledged change is in the store. It owns three promises
//! that the store cannot give: a request is bounded in time, memory and number ([`config`]); every
//! error has one shape and leaks nothing (`problem`); requests in flight at shutdown are finished
//! or cleanly cut ([`server`]).

mod app;
mod audit;
mod auth;
mod background;
mod claims;
pub mod commands;
pub mod config;
mod domains;
mod error;
mod events;
mod examples;
mod failures;
mod health;
mod http;
pub mod jwt;
mod lock;
mod metrics;
pub mod mirror;
mod oci;
mod problem;
mod pull_through;
mod rates;
mod redirect;
mod reload;
mod reports;
pub mod routes;
pub mod server;
pub mod storage;
mod ui;
mod v1;

pub use config::Config;
pub use error::Error;
pub use http::tls::TlsError;
pub use lock::DataLock;
pub use reload::Reloader;
pub use server::Server;
