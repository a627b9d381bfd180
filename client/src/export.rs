//! Exports: a snapshot as an OCI artifact of a few packs, in a directory, a tar file, a bucket or a
//! registry of another program.
//!
//! ```text
//! export: store or registry ─▶ plan of everything ─▶ cut into packs ─▶ packs that are not there yet ─▶ manifest ─▶ index, last
//! import: index ─▶ manifest ─▶ documents, indexes of packs ─▶ a source of a push: only what the destination lacks
//! ```
//!
//! [`Place`] says where a layout is; `layout::Layout` is one behaviour for all places; `write` and
//! `read` know packs and no places. `schema::export` has the formats and the rule by which packs
//! are cut.

mod bucket;
mod folder;
mod layout;
mod place;
pub(crate) mod read;
mod registry;
mod spool;
mod tar;
mod write;

pub use place::{Place, PlaceOptions};
pub use read::{Exported, Listed, Shelf};
pub use registry::{Address, Named};
pub use write::{ExportReport, Exporter};
