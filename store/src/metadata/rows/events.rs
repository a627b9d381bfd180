//! The log of events.

use pfr_schema::api::GcReport;
use pfr_schema::journal::Record;

/// Where the log of events stands. Its numbers mean nothing without its epoch: a rebuilt database,
/// and a domain that is made again, number anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLog {
    /// The name of this log: its epoch.
    pub epoch: String,
    /// The greatest number that is not kept any more; 0 if all events are.
    pub forgotten: u64,
    /// The number of the newest event, or of the last one that there was.
    pub last: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Happening {
    /// A tag or a snapshot changed.
    Names(Record),
    /// A collection ended that found something to do.
    Collection(GcReport),
}

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its number: later events have greater ones.
    pub number: u64,
    /// When it came into the log, in milliseconds since 1970.
    pub at: u64,
    /// The change or the collection.
    pub what: Happening,
}

/// Some events, and where the log stands: both of one state of the tables.
#[derive(Clone, Debug, PartialEq)]
pub struct EventPage {
    /// None: the log has not begun, or was lost with its database.
    pub log: Option<EventLog>,
    /// Events in the order of their numbers.
    pub events: Vec<Event>,
}
