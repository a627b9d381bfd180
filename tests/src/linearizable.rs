//! Whether a history of one tag is linearizable: whether every operation can have taken place at one moment between its call and its answer.
//!
//! The search is that of Wing and Gong, with the memory of Lowe: a configuration (which operations took place, and where the tag is then) that led
//! nowhere is not tried again. An operation whose answer was lost took place at any time after its call, or never.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::time::Duration;

/// What a tag points at, by number; none: there is no tag.
pub type Value = Option<usize>;

/// What must be so for a change to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    None,
    /// There is a tag.
    Exists,
    /// The tag points there.
    Is(Value),
}

impl Condition {
    fn holds(self, value: Value) -> bool {
        match self {
            Self::None => true,
            Self::Exists => value.is_some(),
            Self::Is(expected) => value == expected,
        }
    }
}

/// What was asked for, and what was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The tag was found to point there.
    Read(Value),
    /// The tag was moved or deleted, if the condition held.
    Changed(Condition, Value),
    /// The same was refused, because the condition did not hold.
    Refused(Condition),
    /// The same was asked for, and the answer was lost.
    Lost(Condition, Value),
}

/// An operation, and when it was called and answered.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// When.
    pub called: Duration,
    /// When. That of a lost answer does not matter.
    pub answered: Duration,
    /// What.
    pub operation: Operation,
}

impl Event {
    /// Whether it must have taken place.
    fn is_certain(&self) -> bool {
        !matches!(self.operation, Operation::Lost(..))
    }

    /// Where the tag is after it, if it can take place where the tag is `before`.
    fn applied(&self, before: Value) -> Option<Value> {
        match self.operation {
            Operation::Read(found) => (found == before).then_some(before),
            Operation::Changed(condition, value) => condition.holds(before).then_some(value),
            Operation::Refused(condition) => (!condition.holds(before)).then_some(before),
            // Without an effect it need not take place.
            Operation::Lost(condition, value) => (condition.holds(before) && value != before).then_some(value),
        }
    }
}

/// Whether the events of one tag, which does not exist at first, can be put in an order that explains all answers.
///
/// # Errors
/// In words: how far an order goes at most, and what comes then.
pub fn check(events: &[Event]) -> Result<(), String> {
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.called);
    let certain = events.iter().filter(|event| event.is_certain()).count();
    let mut search = Search { events: &events, tried: HashSet::new(), longest: (0, None, BTreeMap::new()) };
    // Explicit, for a history may be longer than the stack is deep.
    let mut configurations = vec![Configuration { done: vec![0; events.len().div_ceil(64)], certain: 0, first: 0, value: None }];
    while let Some(configuration) = configurations.pop() {
        if configuration.certain == certain {
            return Ok(());
        }
        search.next(&configuration, &mut configurations);
    }
    let (count, value, next) = search.longest;
    let mut words =
        format!("not linearizable: {count} of {certain} operations can be ordered, the tag is then at {value:?}; next may come\n");
    for event in next.values() {
        let _ = writeln!(words, "  {event:?}");
    }
    Err(words)
}

/// Which operations took place, and where the tag is then.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Configuration {
    done: Vec<u64>,
    /// How many of them are certain.
    certain: usize,
    /// All before this one took place.
    first: usize,
    value: Value,
}

impl Configuration {
    fn has(&self, event: usize) -> bool {
        self.done[event / 64] & (1 << (event % 64)) != 0
    }
}

struct Search<'a> {
    events: &'a [Event],
    tried: HashSet<Configuration>,
    /// For people: the most operations that could be ordered, and what was in the way then.
    longest: (usize, Value, BTreeMap<usize, Event>),
}

impl Search<'_> {
    /// Adds the configurations that follow.
    fn next(&mut self, before: &Configuration, configurations: &mut Vec<Configuration>) {
        // What was called after something was answered cannot have come before it.
        let (mut answered, mut next) = (Duration::MAX, Vec::new());
        for number in (before.first..self.events.len()).filter(|number| !before.has(*number)) {
            let event = &self.events[number];
            if event.called > answered {
                break;
            }
            if event.is_certain() {
                answered = answered.min(event.answered);
            }
            next.push(number);
        }
        next.retain(|number| self.events[*number].called <= answered);
        if before.certain >= self.longest.0 {
            self.longest = (before.certain, before.value, next.iter().map(|event| (*event, self.events[*event])).collect());
        }
        // The last one is tried first: what is certain and was called first, before what may never have taken place.
        let (certain, lost): (Vec<usize>, Vec<usize>) = next.into_iter().partition(|event| self.events[*event].is_certain());
        for event in lost.into_iter().rev().chain(certain.into_iter().rev()) {
            let Some(value) = self.events[event].applied(before.value) else { continue };
            let mut after = before.clone();
            after.done[event / 64] |= 1 << (event % 64);
            after.certain += usize::from(self.events[event].is_certain());
            after.value = value;
            while after.first < self.events.len() && after.has(after.first) {
                after.first += 1;
            }
            if self.tried.insert(after.clone()) {
                configurations.push(after);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Condition::{Exists, Is};
    use Operation::{Changed, Lost, Read, Refused};

    fn event(called: u64, answered: u64, operation: Operation) -> Event {
        Event { called: Duration::from_millis(called), answered: Duration::from_millis(answered), operation }
    }

    fn put(value: usize) -> Operation {
        Changed(Condition::None, Some(value))
    }

    #[test]
    fn histories_that_have_an_order_are_accepted() {
        for events in [
            vec![],
            vec![event(0, 1, Read(None)), event(2, 3, put(1)), event(4, 5, Read(Some(1)))],
            // Two at once, seen in the order that only one of them explains.
            vec![event(0, 9, put(1)), event(0, 9, put(2)), event(10, 11, Read(Some(1)))],
            // A read beside a write sees either.
            vec![event(0, 9, put(1)), event(1, 2, Read(None)), event(3, 4, Read(Some(1)))],
            // One of two that compare and swap wins.
            vec![event(0, 9, Changed(Is(None), Some(1))), event(0, 9, Refused(Is(None))), event(10, 11, Changed(Exists, None))],
            // What was lost may come late, or never.
            vec![event(0, 1, Lost(Condition::None, Some(1))), event(2, 3, Read(None)), event(4, 5, Read(Some(1)))],
            vec![event(0, 1, Lost(Condition::None, Some(1))), event(2, 3, put(2)), event(4, 5, Read(Some(2)))],
            vec![event(0, 1, put(2)), event(2, 3, Lost(Is(Some(2)), None)), event(4, 5, Refused(Exists))],
        ] {
            check(&events).unwrap_or_else(|words| panic!("{words}\n{events:#?}"));
        }
    }

    #[test]
    fn histories_that_have_none_are_refused() {
        for events in [
            // Never written.
            vec![event(0, 1, Read(Some(1)))],
            // A stale read.
            vec![event(0, 1, put(1)), event(2, 3, put(2)), event(4, 5, Read(Some(1)))],
            // What was told to be done is gone.
            vec![event(0, 1, put(1)), event(2, 3, Read(None))],
            // Both of two that compare and swap win.
            vec![event(0, 9, Changed(Is(None), Some(1))), event(0, 9, Changed(Is(None), Some(2)))],
            // Neither does.
            vec![event(0, 9, Refused(Is(None))), event(0, 9, Refused(Is(None)))],
            // Deleted twice.
            vec![event(0, 1, put(1)), event(2, 9, Changed(Exists, None)), event(2, 9, Changed(Exists, None))],
            // Readers one after the other see a write come and go.
            vec![event(0, 9, put(1)), event(1, 2, Read(Some(1))), event(3, 4, Read(None))],
            // What was lost took place twice.
            vec![event(0, 1, Lost(Condition::None, Some(1))), event(2, 3, Read(Some(1))), event(4, 5, put(2)), event(6, 7, Read(Some(1)))],
            // What was lost took place before it was called.
            vec![event(0, 1, Read(Some(1))), event(2, 3, Lost(Condition::None, Some(1)))],
            // What was lost and was refused for certain, as its condition never held.
            vec![event(0, 1, put(2)), event(2, 3, Lost(Is(None), Some(1))), event(4, 5, Read(Some(1)))],
        ] {
            assert!(check(&events).is_err(), "{events:#?}");
        }
    }

    #[test]
    fn a_long_history_of_many_at_once_is_decided_soon() {
        // Rounds of eight writes at once, then a read of one of them.
        let mut events = Vec::new();
        for round in 0..60_u64 {
            events.extend((0..8).map(|i| event(round * 10, round * 10 + 5, put(round as usize * 8 + i))));
            events.push(event(round * 10 + 6, round * 10 + 7, Read(Some(round as usize * 8 + 3))));
        }
        check(&events).unwrap();
        events.push(event(3000, 3001, Read(Some(5))));
        assert!(check(&events).is_err());
    }
}
