//! The path of every request, whatever its handler: limits of time, number and memory, its id, its
//! log line.

pub(crate) mod body;
pub(crate) mod conditions;
pub(crate) mod head;
pub(crate) mod json;
pub(crate) mod line;
pub(crate) mod media_type;
pub(crate) mod observe;
pub(crate) mod once;
pub(crate) mod path;
pub(crate) mod patience;
pub(crate) mod query;
pub(crate) mod request;
pub(crate) mod resolved;
pub(crate) mod seat;
pub(crate) mod sending;
pub(crate) mod stream;
