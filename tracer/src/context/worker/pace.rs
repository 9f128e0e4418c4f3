//! How often the worker looks at the system by itself.

use std::time::{Duration, Instant};

use crate::context::clock::thread_time;

/// Rounds do not rest longer than this, whatever one takes: what only counters tell is told within two of them.
const LONGEST: Duration = Duration::from_secs(4);
/// What happened is followed for this long at the usual pace.
const FOLLOWED: Duration = Duration::from_secs(3);

/// The last round of some work.
pub(super) struct Round {
    ended: Instant,
    /// CPU time that it took.
    took: Duration,
}

impl Round {
    /// Does the work once.
    pub(super) fn of(work: impl FnOnce()) -> Self {
        let before = thread_time();
        work();
        Self {
            ended: Instant::now(),
            took: thread_time().saturating_sub(before),
        }
    }

    /// Time since it ended.
    pub(super) fn age(&self) -> Duration {
        self.ended.elapsed()
    }

    /// Time until the next one, where one is due `every` so long.
    pub(super) fn rest(&self, every: Duration) -> Duration {
        every.saturating_sub(self.age())
    }

    /// How often it is due if it may take one `part`-th of a CPU, and `every` so long at the soonest.
    pub(super) fn at_most(&self, part: u32, every: Duration) -> Duration {
        (self.took * part).min(LONGEST).max(every)
    }
}

/// When something happened last that made the worker look: a question, a change of addresses, a counter that moved.
#[derive(Default)]
pub(super) struct Happened(Option<Instant>);

impl Happened {
    /// It happens now.
    pub(super) fn now(&mut self) {
        self.0 = Some(Instant::now());
    }

    /// Whether more of it is likely.
    pub(super) fn lately(&self) -> bool {
        self.0.is_some_and(|last| last.elapsed() < FOLLOWED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_rests_by_what_it_took() {
        let took = |took| Round {
            ended: Instant::now(),
            took: Duration::from_micros(took),
        };
        let every = Duration::from_secs(1);
        assert_eq!(took(100).at_most(500, every), every);
        assert_eq!(took(4_000).at_most(500, every), Duration::from_secs(2));
        assert_eq!(took(50_000).at_most(500, every), LONGEST);
        assert_eq!(took(50_000).at_most(500, LONGEST * 2), LONGEST * 2);
        assert!(took(0).rest(every) <= every && took(0).rest(Duration::ZERO).is_zero());
    }

    #[test]
    fn work_is_measured_by_its_cpu_time() {
        let slept = Round::of(|| std::thread::sleep(Duration::from_millis(20)));
        let worked = Round::of(|| {
            let until = thread_time() + Duration::from_millis(20);
            while thread_time() < until {}
        });
        assert!(slept.took < worked.took && worked.took >= Duration::from_millis(20));
    }

    #[test]
    fn nothing_happened_at_first() {
        let mut happened = Happened::default();
        assert!(!happened.lately());
        happened.now();
        assert!(happened.lately());
    }
}
