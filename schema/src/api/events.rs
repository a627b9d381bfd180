//! Events: what happens in a domain, for those that follow it.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::{RepositoryName, Tag, name_error};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

api! {
    /// Something that happened. Server-sent events carry it as `data`, and `kind` as `event`.
    pub struct Event {
        /// Its id. A reader that comes back sends the last one that it has read.
        pub id: String,
        /// Milliseconds since 1970, UTC.
        pub at: u64,
        /// What happened.
        pub kind: EventKind,
        /// The repository; absent for a collection, which is about all of them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub repository: Option<RepositoryName>,
        /// The tag that was moved or deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tag: Option<Tag>,
        /// The snapshot that was pushed, tagged or deleted. Absent where a tag was deleted: its
        /// snapshot stays.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub digest: Option<Digest>,
        /// Parents of a pushed snapshot, in order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub parents: Vec<Digest>,
        /// `artifactType` of what was pushed, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub artifact_type: Option<String>,
        /// Raw bytes that were new in the domain when it was pushed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub new_bytes: Option<u64>,
        /// What a collection freed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub collection: Option<EventCollection>,
    }

    /// What a collection freed.
    #[derive(Eq)]
    pub struct EventCollection {
        /// Its id: `GET /v1/gc/{run}` has the report.
        pub run: String,
        /// Blobs deleted.
        pub objects: u64,
        /// Bytes of their frames.
        pub freed_bytes: u64,
        /// Bytes of packs deleted from storage.
        pub deleted_bytes: u64,
    }

    /// The `data` of the event `reset`: events between the id that the reader sent and this one are
    /// not known any more. What the reader knows of the registry may be out of date; it reads the
    /// lists again.
    #[derive(Eq)]
    pub struct EventReset {
        /// From here on there is no gap.
        pub id: String,
        /// Why.
        pub reason: String,
    }
}

/// The `data` of one message to a reader of events: of `reset`, or of any other event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Followed {
    /// Something happened.
    Event(Box<Event>),
    /// The registry does not know any more what happened before this point.
    Reset(EventReset),
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A snapshot or an image was pushed to a repository that did not have it.
    Pushed,
    /// A tag was made or moved.
    Tagged,
    /// A tag was deleted, or a snapshot together with its tags.
    Deleted,
    /// A collection ended that freed something. For callers that may operate the domain.
    Collected,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Pushed, Self::Tagged, Self::Deleted, Self::Collected];

    /// Its name: the `event` of a server-sent event.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pushed => "pushed",
            Self::Tagged => "tagged",
            Self::Deleted => "deleted",
            Self::Collected => "collected",
        }
    }
}

impl FromStr for EventKind {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| name_error("kind of event", text, "expected pushed, tagged, deleted or collected"))
    }
}

/// The name of the event that says that others are lost.
pub const RESET: &str = "reset";

/// A position in the events of a domain: the epoch of their log, and the number of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventId {
    /// Names the log. A rebuilt database, and a domain that is made again, have another one.
    pub epoch: String,
    /// The number in it; 0 before the first event.
    pub number: u64,
}

/// Most characters of an epoch.
const EPOCH: usize = 32;

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch, self.number)
    }
}

impl FromStr for EventId {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let parsed = || {
            let (epoch, number) = text.split_once('-')?;
            let is_epoch = (1..=EPOCH).contains(&epoch.len()) && epoch.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            let id = Self { epoch: epoch.to_owned(), number: number.parse().ok()? };
            // Only the spelling that registries send: ids are compared as text.
            (is_epoch && i64::try_from(id.number).is_ok() && id.to_string() == text).then_some(id)
        };
        parsed().ok_or_else(|| name_error("event id", text, "expected the `id` of an event"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_id_reads_back(epoch in "[0-9a-f]{1,32}", number in 0..=i64::MAX.unsigned_abs()) {
            let id = EventId { epoch, number };
            prop_assert_eq!(id.to_string().parse::<EventId>().expect("just written"), id);
        }

        #[test]
        fn any_text_is_an_id_in_its_one_spelling_or_refused(text in "\\PC{0,60}|[0-9a-f]{0,34}-?[0-9]{0,21}") {
            if let Ok(id) = text.parse::<EventId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }

    #[test]
    fn what_is_no_id_is_refused() {
        for text in ["", "-", "a-", "-1", "a-01", "a-+1", "A-1", "a-1-2", "a-9223372036854775808", "a-1\0", "a-1 "] {
            assert!(text.parse::<EventId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn kinds_have_the_names_that_json_has() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).expect("JSON"), kind.name());
            assert_eq!(kind.name().parse::<EventKind>().expect("a kind"), kind);
        }
    }
}
