//! Requests and responses of `/v1`, as JSON. `docs/protocol.md` tells how they follow each other.
//! One file for each group of verbs; all types are `api::NAME`.

// Requests refuse fields they do not know: a misspelt condition must not be ignored. Answers may
// grow.
macro_rules! api {
    ($($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* })*) => {
        $(#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        $(#[$meta])*
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* })*
    };
}

mod agents;
mod audit;
mod domains;
mod events;
mod gc;
mod integrity;
mod matching;
mod names;
#[cfg(feature = "openapi")]
mod openapi;
mod problem;
mod pull;
mod push;
mod quota;
mod retention;
mod signing;
mod snapshots;
mod stats;
mod tasks;
mod tokens;

pub use agents::*;
pub use audit::*;
pub use domains::*;
pub use events::*;
pub use gc::*;
pub use integrity::*;
pub use matching::*;
pub use names::*;
pub use problem::*;
pub use pull::*;
pub use push::*;
pub use quota::*;
pub use retention::*;
pub use signing::*;
pub use snapshots::*;
pub use stats::*;
pub use tasks::*;
pub use tokens::*;
