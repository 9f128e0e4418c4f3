//! The drops that the view remembers: bounded, and fair to causes that are rare.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use crate::diagnose::{Drop, Name};

/// Drops that are remembered.
pub(super) const EVENTS_MAX: usize = 10_000;

/// A drop and its place in the order of arrival.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) number: u64,
    pub(super) drop: Arc<Drop>,
}

/// Remembers the last drops. When it is full, the cause that has most gives up its oldest, so that a flood of one never
/// hides another.
#[derive(Debug)]
pub(super) struct Events {
    by_cause: BTreeMap<String, VecDeque<Event>>,
    len: usize,
    max: usize,
    next: u64,
    /// Nothing is given up, what does not fit is not taken.
    frozen: bool,
}

impl Events {
    pub(super) fn new(max: usize) -> Self {
        Self {
            by_cause: BTreeMap::new(),
            len: 0,
            max,
            next: 0,
            frozen: false,
        }
    }

    /// Takes a drop.
    pub(super) fn push(&mut self, drop: Drop) {
        let number = self.next;
        self.next += 1;
        if self.len >= self.max {
            if self.frozen {
                return;
            }
            self.give_up_one();
        }
        let queue = self.by_cause.entry(drop.cause.clone()).or_default();
        queue.push_back(Event {
            number,
            drop: Arc::new(drop),
        });
        self.len += 1;
    }

    /// Gives a name to the drops that were told before it was known.
    pub(super) fn join(&mut self, name: &Name) {
        for event in self.by_cause.values_mut().flatten() {
            name.join(Arc::make_mut(&mut event.drop));
        }
    }

    fn give_up_one(&mut self) {
        if let Some(longest) = self.by_cause.values_mut().max_by_key(|queue| queue.len())
            && longest.pop_front().is_some()
        {
            self.len -= 1;
        }
    }

    /// Number that the next drop gets.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Keeps what is there while the user looks at it.
    pub(super) fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Those below `until`, of this cause if one is given, newest first.
    pub(super) fn newest_first(&self, until: u64, cause: Option<&str>, benign: bool) -> Vec<&Event> {
        let queues: Vec<&VecDeque<Event>> = match cause {
            Some(cause) => self.by_cause.get(cause).into_iter().collect(),
            None => self.by_cause.values().collect(),
        };
        let mut events: Vec<&Event> = queues
            .into_iter()
            .flatten()
            .filter(|event| event.number < until && (benign || cause.is_some() || !event.drop.benign))
            .collect();
        events.sort_unstable_by_key(|event| std::cmp::Reverse(event.number));
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    fn drop_of(cause: &str) -> Drop {
        Drop {
            cause: cause.into(),
            ..samples::accept_queue()
        }
    }

    fn count(events: &Events, cause: &str) -> usize {
        events.newest_first(u64::MAX, Some(cause), true).len()
    }

    #[test]
    fn a_flood_does_not_hide_a_rare_cause() {
        let mut events = Events::new(100);
        for _ in 0..5 {
            events.push(drop_of("rare"));
        }
        for _ in 0..10_000 {
            events.push(drop_of("flood"));
        }
        assert_eq!(count(&events, "rare"), 5);
        assert_eq!(count(&events, "flood"), 95);
    }

    #[test]
    fn frozen_events_stay() {
        let mut events = Events::new(10);
        events.push(drop_of("first"));
        let until = events.next();
        events.freeze(true);
        for _ in 0..20 {
            events.push(drop_of("later"));
        }
        assert_eq!(events.newest_first(until, None, false).len(), 1);
        events.freeze(false);
        events.push(drop_of("later"));
        assert_eq!(events.newest_first(u64::MAX, None, false).len(), 10);
    }

    #[test]
    fn the_newest_come_first_across_causes() {
        let mut events = Events::new(10);
        for cause in ["a", "b", "a"] {
            events.push(drop_of(cause));
        }
        let numbers: Vec<u64> = events
            .newest_first(u64::MAX, None, false)
            .iter()
            .map(|event| event.number)
            .collect();
        assert_eq!(numbers, [2, 1, 0]);
    }
}
