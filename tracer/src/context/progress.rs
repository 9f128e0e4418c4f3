//! How the processes that hold a socket get on: stopped, waiting for what, held back by their cgroup.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::cgroups;
use crate::diagnose::{CpuLimit, Progress};

/// Threads that were in state D.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Blocked(Vec<PathBuf>);

impl Blocked {
    /// How many still are.
    pub(super) fn still(&self) -> u32 {
        let is_blocked = |task: &&PathBuf| {
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            state(&stat) == Some('D')
        };
        self.0.iter().filter(is_blocked).count() as u32
    }
}

/// Children of the owner that are looked at, and threads of all of them.
const CHILDREN: usize = 64;
const THREADS: usize = 1024;

/// Looks at a process that holds a socket, and at those of its children that hold it, too.
///
/// # Errors
/// The process is gone, or may not be looked at.
pub(super) fn read(pid: u32, inode: u64) -> Result<(Progress, Blocked), String> {
    let mut progress = Progress::default();
    let mut blocked = Blocked::default();
    look(pid, &mut progress, &mut blocked)?;
    for child in children(pid).filter(|&child| holds(child, inode)) {
        // One that has ended meanwhile is left out.
        let _ = look(child, &mut progress, &mut blocked);
    }
    if let Some(path) = cgroups::of_process(pid) {
        let file = |name: &str| read_in_cgroup(&path, name);
        progress.frozen = file("cgroup.events").is_some_and(|text| keyed(&text, "frozen") == Some(1));
        progress.memory_stall = file("memory.pressure").and_then(|text| full_average(&text));
        progress.cpu_limit = cpu_limit(&path);
        progress.cgroup = Some(path);
    }
    Ok((progress, blocked))
}

/// How often a cgroup was held back so far (`nr_throttled` in `cpu.stat`, `cpu_cfs_stat_show`, kernel/sched/core.c, 5.10 - 7.3).
///
/// # Errors
/// It is gone.
pub(super) fn throttled(cgroup: &str) -> Result<u64, String> {
    read_in_cgroup(cgroup, "cpu.stat")
        .and_then(|text| keyed(&text, "nr_throttled"))
        .ok_or_else(|| format!("cpu.stat of the cgroup {cgroup} does not tell"))
}

/// Adds a process with its threads.
fn look(pid: u32, progress: &mut Progress, blocked: &mut Blocked) -> Result<(), String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| format!("/proc/{pid}: {error}"))?;
    for task in tasks.flatten() {
        if progress.threads as usize >= THREADS {
            break;
        }
        let read = |name: &str| fs::read_to_string(task.path().join(name)).ok();
        let Some(state) = read("stat").as_deref().and_then(state) else {
            continue;
        };
        progress.threads += 1;
        match state {
            'T' | 't' => progress.stopped += 1,
            'D' => {
                progress.blocked += 1;
                blocked.0.push(task.path());
            }
            'R' => progress.running += 1,
            _ => {}
        }
        // A thread in state D says most; of others the first.
        if progress.waits_in.is_none() || state == 'D' && progress.blocked == 1 {
            let named = |name: &String| !name.is_empty() && name != "0";
            let function = read("wchan").filter(named).or_else(|| innermost(&read("stack")?));
            progress.waits_in = function.or_else(|| progress.waits_in.take());
        }
    }
    progress.processes += 1;
    Ok(())
}

/// The innermost function of a kernel stack as `/proc/PID/stack` has it (`proc_pid_stack`, fs/proc/base.c): 5.10 often does not
/// tell it otherwise.
fn innermost(stack: &str) -> Option<String> {
    let (_, call) = stack.lines().next()?.split_once("] ")?;
    let name = call.split('+').next()?;
    (!name.is_empty() && !name.starts_with("0x")).then(|| name.to_owned())
}

/// The state in `/proc/PID/stat`, behind the name, which may hold anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn children(pid: u32) -> impl Iterator<Item = u32> {
    let of_task = |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).ok();
    let found: Vec<u32> = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(of_task)
        .flat_map(|text| {
            text.split_whitespace()
                .filter_map(|child| child.parse().ok())
                .collect::<Vec<_>>()
        })
        .take(CHILDREN)
        .collect();
    found.into_iter()
}

fn holds(pid: u32, inode: u64) -> bool {
    let link = PathBuf::from(format!("socket:[{inode}]"));
    fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == link))
}

fn read_in_cgroup(path: &str, name: &str) -> Option<String> {
    cgroups::MOUNTED.iter().find_map(|mounted| {
        let file = Path::new(mounted).join(path.trim_start_matches('/')).join(name);
        fs::read_to_string(file).ok()
    })
}

/// The tightest CPU limit of a cgroup and those above it.
fn cpu_limit(path: &str) -> Option<CpuLimit> {
    let mut tightest: Option<CpuLimit> = None;
    for group in Path::new(path).ancestors().filter_map(Path::to_str) {
        let Some(percent) = read_in_cgroup(group, "cpu.max").as_deref().and_then(percent) else {
            continue;
        };
        if tightest.as_ref().is_none_or(|found| percent < found.percent)
            && let Ok(throttled) = throttled(group)
        {
            tightest = Some(CpuLimit {
                cgroup: group.to_owned(),
                percent,
                throttled,
            });
        }
    }
    tightest
}

/// Percent of one CPU that `cpu.max` allows; `None`: no limit.
fn percent(cpu_max: &str) -> Option<u64> {
    let mut words = cpu_max.split_whitespace().map(str::parse::<u64>);
    let (quota, period) = (words.next()?.ok()?, words.next()?.ok()?);
    (period > 0).then(|| (quota * 100).div_ceil(period))
}

/// The value behind a name in a file of names and values.
fn keyed(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == name)?
        .1
        .trim()
        .parse()
        .ok()
}

/// Percent of the last ten seconds in which all of a cgroup waited for memory (Documentation/accounting/psi.rst).
fn full_average(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("full"))?;
    let word = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("avg10="))?;
    word.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read() {
        assert_eq!(state("12 (a) b (c) T 1 2"), Some('T'));
        assert_eq!(
            innermost("[<0>] kernel_clone+0x9d/0x340\n[<0>] do_syscall_64+0x33/0x80\n"),
            Some("kernel_clone".to_owned())
        );
        assert_eq!(innermost(""), None);
        assert_eq!(percent("max 100000\n"), None);
        assert_eq!(percent("2000 100000\n"), Some(2));
        assert_eq!(percent("150 100000\n"), Some(1));
        assert_eq!(keyed("usage_usec 7\nnr_throttled 3\n", "nr_throttled"), Some(3));
        assert_eq!(keyed("populated 1\nfrozen 0\n", "frozen"), Some(0));
        let pressure =
            "some avg10=1.00 avg60=0 avg300=0 total=1\nfull avg10=12.50 avg60=0 avg300=0 total=1\n";
        assert_eq!(full_average(pressure), Some(12.5));
    }

    #[test]
    fn this_process_runs_and_is_not_stopped() {
        let (progress, blocked) = read(std::process::id(), 0).unwrap();
        assert!(blocked.still() <= progress.blocked);
        assert!(progress.threads >= 1 && progress.running >= 1);
        assert_eq!((progress.processes, progress.stopped), (1, 0));
        assert!(read(0, 0).is_err());
    }
}
