//! What every request goes through, whatever its handler: limits in time, number and memory, its id, its log line.

pub(crate) mod body;
pub(crate) mod conditions;
pub(crate) mod extract;
pub(crate) mod head;
pub(crate) mod json;
pub(crate) mod line;
pub(crate) mod observe;
pub(crate) mod once;
pub(crate) mod patience;
pub(crate) mod request;
pub(crate) mod seat;
pub(crate) mod sending;
pub(crate) mod stream;
