//! The user interface for operators: pages that say what the registry holds and what it does.
//!
//! ```text
//! routes ─▶ a page (overview, repository, snapshot, storage, engines, tasks) ─▶ the store functions of /v1
//!                 │
//!                 ├─▶ tree, bars, chart: lineages, costs and sizes as SVG
//!                 └─▶ page: the frame around every page, and the headers that keep it closed
//! OpenAPI document ─▶ docs: the same for people, made once
//! failures ─▶ http::request ─▶ problem: the same problem as a page, if a browser asks
//! ```
//!
//! A browser signs in by HTTP: the page of a 401 comes with a challenge, and the token is the
//! password. A page shows what its caller may pull, and offers what it may use.
//!
//! A page is HTML made on the server: no scripts, one stylesheet, nothing from other hosts. Names
//! and documents are user input; `maud` escapes all that it is given. A page reads what the API
//! reads, by the same functions, and changes nothing: what changes something is a command to copy.

mod bars;
mod chart;
mod docs;
mod engines;
mod files;
mod links;
mod overview;
mod page;
mod problem;
mod repositories;
mod repository;
mod snapshot;
mod storage;
mod tasks;
mod tree;
mod verify;
mod words;

pub(crate) use docs::docs;
pub(crate) use engines::engines;
pub(crate) use files::{icon, style};
pub(crate) use overview::{overview, start};
pub(crate) use problem::Browser;
pub(crate) use repositories::repositories;
pub(crate) use repository::repository;
pub(crate) use snapshot::snapshot;
pub(crate) use storage::storage;
pub(crate) use tasks::tasks;
pub(crate) use verify::verify;
