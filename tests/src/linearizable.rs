//! Whether a history of one tag is linearizable: whether every operation can have taken place at
//! one moment between its call and its answer.
//!
//! The search is that of Wing and Gong, with the memory of Lowe: a configuration (which operations
//! took place, and where the tag is then) that led nowhere is not tried again. An operation whose
//! answer was lost took place at any time after its call, or never. So a configuration is not tried
//! either if another one has the same certain operations and value, and needed fewer of the lost
//! ones: it can go on in every way that this one can. Without that, twenty lost answers would be a
//! million configurations for each step.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::time::Duration;

/// What a tag points at, by number; none: there is no tag.
pub type Value = Option<usize>;

/// The condition of a change.
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

/// A request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The tag was found to point there.
    Read(Value),
    /// The tag was moved or deleted, if the condition held.
    Changed(Condition, Value),
    /// The same was refused, because the condition did not hold.
    Refused(Condition),
    /// The same request, whose answer was lost.
    Lost(Condition, Value),
}

/// An operation, and when it was called and answered.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Time of the call.
    pub called: Duration,
    /// Time of the answer. It has no meaning if the answer was lost.
    pub answered: Duration,
    /// The operation.
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

/// Whether the events of one tag, which does not exist at first, can be put in an order that
/// explains all answers.
///
/// # Errors
/// In words: how far an order goes at most, and what comes then.
pub fn check(events: &[Event]) -> Result<(), String> {
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.called);
    let certain = events.iter().filter(|event| event.is_certain()).count();
    let mut search = Search { events: &events, tried: HashMap::new(), longest: (0, None, BTreeMap::new()) };
    // An explicit stack, since a long history would overflow the call stack.
    let none = vec![0; events.len().div_ceil(64)];
    let mut configurations = vec![Configuration { done: none.clone(), lost: none, certain: 0, first: 0, value: None }];
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
#[derive(Clone)]
struct Configuration {
    /// The certain ones.
    done: Vec<u64>,
    /// Those whose answer was lost.
    lost: Vec<u64>,
    /// How many are certain.
    certain: usize,
    /// All before this one took place.
    first: usize,
    value: Value,
}

impl Configuration {
    fn has(&self, event: usize) -> bool {
        (self.done[event / 64] | self.lost[event / 64]) & (1 << (event % 64)) != 0
    }
}

struct Search<'a> {
    events: &'a [Event],
    /// By certain operations and value: the lost ones that took place, no set within another.
    tried: HashMap<(Vec<u64>, Value), Vec<Vec<u64>>>,
    /// For people: the most operations that could be ordered, and what was in the way then.
    longest: (usize, Value, BTreeMap<usize, Event>),
}

impl Search<'_> {
    /// Adds the configurations that follow.
    fn next(&mut self, before: &Configuration, configurations: &mut Vec<Configuration>) {
        // A call that began after another one was answered cannot have taken place before it.
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
        // The last one is tried first: certain calls in the order in which they began, before those
        // that may never have taken place.
        let (certain, mut lost): (Vec<usize>, Vec<usize>) = next.into_iter().partition(|event| self.events[*event].is_certain());
        // Of several that do the same, all of them called by now, it does not matter which one is
        // left.
        let mut kinds = Vec::new();
        lost.retain(|event| {
            let operation = self.events[*event].operation;
            let is_new = !kinds.contains(&operation);
            kinds.extend(is_new.then_some(operation));
            is_new
        });
        for event in lost.into_iter().rev().chain(certain.into_iter().rev()) {
            let Some(value) = self.events[event].applied(before.value) else { continue };
            let mut after = before.clone();
            let is_certain = self.events[event].is_certain();
            let places = if is_certain { &mut after.done } else { &mut after.lost };
            places[event / 64] |= 1 << (event % 64);
            after.certain += usize::from(is_certain);
            after.value = value;
            while after.first < self.events.len() && after.has(after.first) {
                after.first += 1;
            }
            if self.is_new(&after) {
                configurations.push(after);
            }
        }
    }

    /// Whether nothing was tried that can go on in every way that this one can; notes it then.
    fn is_new(&mut self, configuration: &Configuration) -> bool {
        let within = |one: &[u64], other: &[u64]| one.iter().zip(other).all(|(one, other)| one & !other == 0);
        let tried = self.tried.entry((configuration.done.clone(), configuration.value)).or_default();
        if tried.iter().any(|lost| within(lost, &configuration.lost)) {
            return false;
        }
        tried.retain(|lost| !within(&configuration.lost, lost));
        tried.push(configuration.lost.clone());
        true
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
            // A call whose answer was lost may take place late, or never.
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
            // A change that was acknowledged is gone.
            vec![event(0, 1, put(1)), event(2, 3, Read(None))],
            // Both of two that compare and swap win.
            vec![event(0, 9, Changed(Is(None), Some(1))), event(0, 9, Changed(Is(None), Some(2)))],
            // Neither does.
            vec![event(0, 9, Refused(Is(None))), event(0, 9, Refused(Is(None)))],
            // Deleted twice.
            vec![event(0, 1, put(1)), event(2, 9, Changed(Exists, None)), event(2, 9, Changed(Exists, None))],
            // Readers one after the other see a write come and go.
            vec![event(0, 9, put(1)), event(1, 2, Read(Some(1))), event(3, 4, Read(None))],
            // A call whose answer was lost took place twice.
            vec![event(0, 1, Lost(Condition::None, Some(1))), event(2, 3, Read(Some(1))), event(4, 5, put(2)), event(6, 7, Read(Some(1)))],
            // A call whose answer was lost took place before it began.
            vec![event(0, 1, Read(Some(1))), event(2, 3, Lost(Condition::None, Some(1)))],
            // A call whose answer was lost took place, although its condition never held.
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

    #[test]
    fn twenty_lost_answers_are_decided_soon() {
        // All called at first, and each write may be seen whenever nothing else is. Half of them
        // write the same.
        let mut events: Vec<Event> = (0..20).map(|i| event(0, 1, Lost(Condition::None, Some(100 + i.min(10))))).collect();
        for round in 0..20_usize {
            let at = 10 + 10 * round as u64;
            events.push(event(at, at + 3, put(round)));
            events.push(event(at + 1, at + 4, put(50 + round)));
            // Every third round sees a lost one: three distinct, and then those that write the
            // same.
            let seen = if round % 3 == 0 { 108 + (round / 3).min(2) } else { round };
            events.push(event(at + 6, at + 7, Read(Some(seen))));
        }
        check(&events).unwrap();
        // There were ten that write 110, and five of them were seen: six more are one too many.
        for more in 0..6_u64 {
            let at = 1000 + 10 * more;
            events.extend([event(at, at + 1, put(1)), event(at + 2, at + 3, Read(Some(110)))]);
            assert_eq!(check(&events).is_ok(), more < 5, "{more}");
        }
    }

    /// The search without any memory.
    fn has_order(events: &[Event], left: &[usize], value: Value) -> bool {
        let answered = left.iter().map(|i| &events[*i]).filter(|event| event.is_certain()).map(|event| event.answered).min();
        let Some(answered) = answered else { return true };
        left.iter().filter(|i| events[**i].called <= answered).any(|next| {
            let rest: Vec<usize> = left.iter().copied().filter(|i| i != next).collect();
            events[*next].applied(value).is_some_and(|value| has_order(events, &rest, value))
        })
    }

    #[test]
    fn it_decides_as_a_search_that_leaves_out_nothing() {
        let mut random = 7_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        let mut accepted = 0;
        for case in 0..4_000 {
            let value = |below: &mut dyn FnMut(u64) -> u64| Some(below(3) as usize).filter(|value| *value > 0);
            let events: Vec<Event> = (0..6)
                .map(|_| {
                    let called = below(12);
                    let condition = match below(4) {
                        0 => Exists,
                        1 => Is(value(&mut below)),
                        _ => Condition::None,
                    };
                    let operation = match below(6) {
                        0..2 => Read(value(&mut below)),
                        2 => Changed(condition, value(&mut below)),
                        3 => Refused(Is(value(&mut below))),
                        _ => Lost(condition, value(&mut below)),
                    };
                    event(called, called + 1 + below(6), operation)
                })
                .collect();
            let expected = has_order(&events, &[0, 1, 2, 3, 4, 5], None);
            assert_eq!(check(&events).is_ok(), expected, "case {case}: {events:#?}");
            accepted += u32::from(expected);
        }
        assert!((400..3_600).contains(&accepted), "{accepted}");
    }
}
