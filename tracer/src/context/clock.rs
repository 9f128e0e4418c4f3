//! Clocks: the wall time of an event, and the kernel's tick.

use std::time::Duration;

use nix::time::{ClockId, clock_getres, clock_gettime};

const SECOND: i128 = 1_000_000_000;

/// Wall clock time, nanoseconds since 1970 UTC, of a moment on the kernel's monotonic clock.
pub(super) fn wall_time_ns(ktime_ns: u64) -> i128 {
    i128::from(ktime_ns) + offset_ns()
}

/// Wall clock time now, RFC 3339, UTC.
pub fn wall_time() -> String {
    jiff::Timestamp::now().to_string()
}

/// The kernel's monotonic clock, in nanoseconds; 0 should it fail.
pub fn monotonic_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| {
        (i128::from(time.tv_sec()) * SECOND + i128::from(time.tv_nsec())) as u64
    })
}

/// CPU time of the calling thread; none should the clock fail.
pub(super) fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// CLOCK_REALTIME − CLOCK_MONOTONIC in nanoseconds, 0 should a clock fail. Measured anew each time (it costs three
/// reads of the vDSO), so that a stepped wall clock is followed at once.
pub fn offset_ns() -> i128 {
    let read = |clock: ClockId| {
        clock_gettime(clock).map(|time| i128::from(time.tv_sec()) * SECOND + i128::from(time.tv_nsec()))
    };
    match (
        read(ClockId::CLOCK_MONOTONIC),
        read(ClockId::CLOCK_REALTIME),
        read(ClockId::CLOCK_MONOTONIC),
    ) {
        (Ok(before), Ok(real), Ok(after)) => real - i128::midpoint(before, after),
        _ => 0,
    }
}

/// The kernel's ticks per second: the coarse clocks advance once per tick, and their resolution is
/// `TICK_NSEC` = 10⁹ / HZ (`hrtimer_get_res`/`KTIME_LOW_RES`, `include/linux/hrtimer.h`, 5.10 - 7.3).
pub(super) fn hz() -> Option<u32> {
    let resolution = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).ok()?;
    (resolution.tv_sec() == 0)
        .then(|| ticks_per_second(resolution.tv_nsec()))
        .flatten()
}

fn ticks_per_second(tick_ns: i64) -> Option<u32> {
    let tick_ns = u32::try_from(tick_ns).ok().filter(|&tick| tick > 0)?;
    let hz = (1_000_000_000 + tick_ns / 2) / tick_ns;
    (24..=10_000).contains(&hz).then_some(hz)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hz_is_the_inverse_of_the_tick() {
        assert_eq!(ticks_per_second(4_000_000), Some(250));
        assert_eq!(ticks_per_second(1_000_000), Some(1000));
        assert_eq!(ticks_per_second(10_000_000), Some(100));
        assert_eq!(ticks_per_second(3_333_333), Some(300));
        // A kernel that answers with the resolution of the fine clock tells nothing about its tick.
        assert_eq!(ticks_per_second(1), None);
        assert_eq!(ticks_per_second(0), None);
    }

    #[test]
    fn this_host_has_a_tick() {
        let hz = hz().expect("the coarse clock has the resolution of the tick");
        assert!((24..=10_000).contains(&hz), "{hz}");
    }

    #[test]
    fn an_event_of_now_has_the_wall_time_of_now() {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
        let wall = wall_time_ns(now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64);
        let system = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as i128;
        assert!((wall - system).abs() < SECOND, "{wall} {system}");
    }
}
