//! What every request passes before and after its handler: limits of time, number and memory, the
//! request id, the log line.

pub(crate) mod address;
pub(crate) mod arrivals;
pub(crate) mod base;
pub(crate) mod body;
pub(crate) mod conditions;
pub(crate) mod connections;
pub(crate) mod handshake;
pub(crate) mod head;
pub(crate) mod host;
pub(crate) mod json;
pub(crate) mod media_type;
pub(crate) mod observe;
pub(crate) mod once;
pub(crate) mod path;
pub(crate) mod permit;
pub(crate) mod query;
pub(crate) mod request;
pub(crate) mod resolved;
mod same_origin;
pub(crate) mod sending;
pub(crate) mod stream;
pub(crate) mod timeout;
pub(crate) mod tls;
mod traced;
