//! Registries over every pair of metadata and storage, several of them over one, and what happens
//! when the storage goes away.

pub mod backend;
mod domains;
mod fleet;
mod matrix;
mod outage;
mod redirects;
mod secrets;
