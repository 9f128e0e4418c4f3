//! What else this machine does while a guest runs: in a plain guest, time is the machine's.

use std::fs;
use std::time::Instant;

use anyhow::{Context as _, Result};

use super::figures::Machine;

/// Ticks of `/proc/stat` and `/proc/PID/stat` in a second (`USER_HZ`, always 100 on x86-64).
const TICKS: f64 = 100.0;

/// Ticks of CPU time so far.
#[derive(Clone, Copy)]
struct Ticks {
    /// Of all that this machine does.
    busy: u64,
    /// Of this process and all that it has waited for.
    own: u64,
}

/// A look at this machine from a start to an end.
pub(super) struct Watch {
    started: Instant,
    before: Ticks,
}

impl Watch {
    /// Starts to look.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub(super) fn start() -> Result<Self> {
        Ok(Self {
            started: Instant::now(),
            before: read()?,
        })
    }

    /// What was done meanwhile; a guest that ran alone has ended by now.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub(super) fn end(&self, way: &str) -> Result<Machine> {
        let seconds = self.started.elapsed().as_secs_f64();
        let now = read()?;
        let (busy, own) = (now.busy - self.before.busy, now.own - self.before.own);
        Ok(Machine {
            way: way.to_owned(),
            seconds,
            cpus: std::thread::available_parallelism()?.get(),
            guest_cpus: own as f64 / TICKS / seconds,
            other_cpus: busy.saturating_sub(own) as f64 / TICKS / seconds,
        })
    }
}

fn read() -> Result<Ticks> {
    let busy = busy(&fs::read_to_string("/proc/stat")?).context("/proc/stat has no CPU times")?;
    let own = own(&fs::read_to_string("/proc/self/stat")?).context("/proc/self/stat has no CPU times")?;
    Ok(Ticks { busy, own })
}

/// Sums up what is not idle of the first line: user, nice, system, irq, softirq (`show_stat`, fs/proc/stat.c).
fn busy(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let times: Vec<u64> = line
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = times[..] else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

/// Sums up utime, stime, cutime, cstime (`do_task_stat`, fs/proc/array.c).
fn own(stat: &str) -> Option<u64> {
    // The name before may hold spaces.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(11);
    let times: Vec<u64> = words
        .by_ref()
        .take(4)
        .map_while(|word| word.parse().ok())
        .collect();
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(busy("cpu  10 2 30 4000 500 6 7 80 0 0\ncpu0 1 2 3\n"), Some(55));
        assert_eq!(busy("intr 1"), None);
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 100 200 0 0 11 12 13 14 20 0 1 0 5";
        assert_eq!(own(stat), Some(50));
        assert_eq!(own("7 (x) S 1"), None);
    }
}
