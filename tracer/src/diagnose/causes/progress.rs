//! Why the owner of a socket does not keep up: evidence and remedy that several causes have in common.

use super::values::who;
use crate::diagnose::{Facts, Finding, Owner, Progress};

/// Stalls from this percentage of the time on count as the reason.
const STALLED: f64 = 10.0;

/// Evidence that [`put`] gives.
pub(super) const EVIDENCE: [(&str, &str); 6] = [
    (
        "held_up_by",
        "why the owner does not keep up, as looked at just after: stopped (SIGSTOP or a debugger), frozen (its cgroup), throttled (CPU limit of its cgroup), blocked (threads in state D), memory (its cgroup stalls for memory), busy (it runs), waiting (it sleeps, for something else)",
    ),
    (
        "threads",
        "threads of the owner and of those of its children that hold the socket, too",
    ),
    (
        "blocked_threads",
        "of those, in state D, and a tenth of a second later still: they wait and cannot be interrupted",
    ),
    (
        "waits_in",
        "kernel function in which a thread waits: one in state D if there is one, else the first",
    ),
    (
        "cgroup",
        "the owner's cgroup, or that above it which limits its CPU time",
    ),
    (
        "throttled",
        "times that this cgroup was held back while it was looked at, about a tenth of a second; null without a CPU limit",
    ),
];

/// Why an owner does not keep up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldUp {
    Stopped,
    Frozen,
    Throttled,
    Blocked,
    Memory,
    Busy,
    Waiting,
}

impl HeldUp {
    /// What holds the owner up, the certain before the likely.
    pub(super) fn by(progress: &Progress) -> Option<Self> {
        if progress.threads == 0 {
            None
        } else if progress.stopped == progress.threads {
            Some(Self::Stopped)
        } else if progress.frozen {
            Some(Self::Frozen)
        } else if progress.throttled.is_some_and(|times| times > 0) {
            Some(Self::Throttled)
        } else if progress.blocked > 0 {
            Some(Self::Blocked)
        } else if progress.memory_stall.is_some_and(|percent| percent >= STALLED) {
            Some(Self::Memory)
        } else if progress.running > 0 {
            Some(Self::Busy)
        } else {
            Some(Self::Waiting)
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Frozen => "frozen",
            Self::Throttled => "throttled",
            Self::Blocked => "blocked",
            Self::Memory => "memory",
            Self::Busy => "busy",
            Self::Waiting => "waiting",
        }
    }

    /// Whether a larger queue or buffer cannot help: the owner takes nothing until something else is mended.
    pub(super) const fn takes_nothing(self) -> bool {
        matches!(
            self,
            Self::Stopped | Self::Frozen | Self::Throttled | Self::Blocked | Self::Memory
        )
    }
}

/// Adds the evidence, and the advice that fits it; `does` is what the owner should do, such as "call accept()". Tells
/// what holds the owner up.
pub(super) fn put(found: &mut Finding, facts: &Facts, owner: Option<&Owner>, does: &str) -> Option<HeldUp> {
    let progress = facts.progress.clone().unwrap_or_default();
    let held = HeldUp::by(&progress);
    let limit = progress.cpu_limit.as_ref();
    let known = |number: u32| facts.progress.as_ref().map(|_| number);
    let group = match limit {
        Some(limit) => Some(limit.cgroup.clone()),
        None => progress.cgroup.clone(),
    };
    found
        .put("held_up_by", held.map(HeldUp::name))
        .put("threads", known(progress.threads))
        .put("blocked_threads", known(progress.blocked))
        .put("waits_in", progress.waits_in.clone())
        .put("cgroup", group.clone())
        .put("throttled", limit.and(progress.throttled));
    let who = who(owner);
    let stack = owner.map(|owner| {
        format!(
            "sh -c \"cat /proc/{0}/task/*/stack; cat /proc/{0}/status\"",
            owner.pid
        )
    });
    let at = progress
        .waits_in
        .as_deref()
        .unwrap_or("a function that is not known");
    let folder = group.unwrap_or_default();
    let own = progress.cgroup.unwrap_or_default();
    match held {
        Some(HeldUp::Stopped) => found.advise(
            format!("{who} is stopped and does not {does}: let it go on."),
            owner.map(|owner| format!("kill -CONT {}", owner.pid)),
            "Sends SIGCONT. If a debugger holds it (State: t in /proc/PID/status), leave the debugger instead.",
        ),
        Some(HeldUp::Frozen) => found.advise(
            format!("The cgroup {own} of {who} is frozen, so that it does not {does}: thaw it, such as by `docker unpause` for a container."),
            Some(format!("cat /sys/fs/cgroup{own}/cgroup.freeze /sys/fs/cgroup{own}/cgroup.events")),
            "Reads only. `echo 0 > cgroup.freeze` there thaws it; where cgroup.freeze is 0 already, one above it is frozen.",
        ),
        Some(HeldUp::Throttled) => found.advise(
            format!(
                "{who} may use {} % of a CPU (cgroup {folder}) and has used that up: it stands still until the next period, and does not {does}. Raise the limit, or find what uses the time.",
                limit.map_or(0, |limit| limit.percent)
            ),
            Some(format!("cat /sys/fs/cgroup{folder}/cpu.max /sys/fs/cgroup{folder}/cpu.stat")),
            "Reads only. The limit is CPUQuota= of a systemd unit, --cpus of docker, limits.cpu in Kubernetes; nr_throttled of cpu.stat stops growing once it is high enough.",
        ),
        Some(HeldUp::Blocked) => found.advise(
            format!(
                "{} of {} threads of {who} wait in {at} and cannot be interrupted (state D), and it does not {does}: see for which disk, file system or NFS server.",
                progress.blocked, progress.threads
            ),
            stack,
            "Reads only. A larger queue does not help while that lasts.",
        ),
        Some(HeldUp::Memory) => found.advise(
            format!("The cgroup {own} of {who} waits for memory, and it does not {does}: raise its limit, or find what takes the memory."),
            Some(format!("cat /sys/fs/cgroup{own}/memory.pressure /sys/fs/cgroup{own}/memory.events")),
            "Reads only. The limit is memory.max or memory.high, there or in a cgroup above.",
        ),
        Some(HeldUp::Busy) => found.advise(
            format!("{who} runs, but does not {does} often enough: see what it spends its time with."),
            owner.map(|owner| format!("top -H -b -n 1 -p {}", owner.pid)),
            "Reads only. One thread at 100 % is the one to relieve: by more threads or processes, or by SO_REUSEPORT.",
        ),
        Some(HeldUp::Waiting) => found.advise(
            format!("{who} sleeps in {at} and does not {does}: see what it waits for, such as a lock or another server."),
            stack,
            "Reads only. A larger queue only delays the loss while that lasts.",
        ),
        None => found.advise(
            format!("See what keeps {who} from it: it should {does}, but may be blocked on a file system, stopped, or short of CPU."),
            stack,
            "Reads only. A larger queue only delays the loss while that lasts.",
        ),
    };
    held
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::diagnose::CpuLimit;

    /// A process that all evidence is known of.
    pub(in super::super) fn throttled() -> Progress {
        Progress {
            processes: 1,
            threads: 4,
            blocked: 1,
            running: 1,
            waits_in: Some("io_schedule".to_owned()),
            cgroup: Some("/web/worker".to_owned()),
            cpu_limit: Some(CpuLimit {
                cgroup: "/web".to_owned(),
                percent: 20,
                throttled: 7,
            }),
            throttled: Some(2),
            ..Progress::default()
        }
    }

    #[test]
    fn the_certain_comes_before_the_likely() {
        let all = throttled();
        assert_eq!(HeldUp::by(&all), Some(HeldUp::Throttled));
        let blocked = Progress {
            throttled: Some(0),
            memory_stall: Some(50.0),
            ..all.clone()
        };
        assert_eq!(HeldUp::by(&blocked), Some(HeldUp::Blocked));
        let stalled = Progress {
            blocked: 0,
            ..blocked
        };
        assert_eq!(HeldUp::by(&stalled), Some(HeldUp::Memory));
        let busy = Progress {
            memory_stall: Some(1.0),
            ..stalled
        };
        assert_eq!(HeldUp::by(&busy), Some(HeldUp::Busy));
        let asleep = Progress { running: 0, ..busy };
        assert_eq!(HeldUp::by(&asleep), Some(HeldUp::Waiting));
        let frozen = Progress {
            frozen: true,
            ..all.clone()
        };
        assert_eq!(HeldUp::by(&frozen), Some(HeldUp::Frozen));
        let stopped = Progress {
            stopped: 4,
            frozen: true,
            ..all
        };
        assert_eq!(HeldUp::by(&stopped), Some(HeldUp::Stopped));
        assert_eq!(HeldUp::by(&Progress::default()), None);
    }

    #[test]
    fn each_has_its_own_remedy() {
        let owner = Owner {
            pid: 42,
            comm: "web".to_owned(),
            ..Owner::default()
        };
        let remedy = |progress: Progress| {
            let mut found = Finding::default();
            let facts = Facts {
                progress: Some(progress),
                ..Facts::default()
            };
            put(&mut found, &facts, Some(&owner), "call accept()");
            found.remedy.remove(0)
        };
        let first = remedy(throttled());
        assert!(first.action.contains("20 % of a CPU"), "{first:?}");
        assert_eq!(
            first.command.as_deref(),
            Some("cat /sys/fs/cgroup/web/cpu.max /sys/fs/cgroup/web/cpu.stat")
        );
        let stopped = remedy(Progress {
            threads: 1,
            stopped: 1,
            ..Progress::default()
        });
        assert_eq!(stopped.command.as_deref(), Some("kill -CONT 42"));
        let blocked = remedy(Progress {
            throttled: None,
            cpu_limit: None,
            ..throttled()
        });
        assert!(
            blocked
                .action
                .starts_with("1 of 4 threads of web (pid 42) wait in io_schedule")
        );
    }
}
