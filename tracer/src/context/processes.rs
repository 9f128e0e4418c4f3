//! Which process holds a socket: the lowest pid that has it open.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs,
    path::PathBuf,
    sync::mpsc,
    time::{Duration, Instant},
};

use super::{
    questions::{Answer, Question, Reply},
    runtime::Names,
    state::Shared,
};
use crate::diagnose::Owner;

/// Sockets remembered; beyond that the memory is emptied.
const REMEMBERED: usize = 65_536;
/// A socket that no process held is not looked for again within this time.
const ABSENT_FOR: Duration = Duration::from_secs(1);
/// Longest rest after a search.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Finds owners of sockets by their inode.
#[derive(Debug, Default)]
pub(super) struct Processes {
    found: HashMap<u64, Holder>,
    absent: HashMap<u64, Instant>,
}

/// Where a socket was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    pid: u32,
    descriptor: u32,
}

/// What is remembered of a socket, and still true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Remembered {
    Held(Owner),
    ByNobody,
    /// A [`Processes::search`] must tell.
    Nothing,
}

impl Processes {
    /// What is known without a search.
    pub(super) fn remembered(&mut self, inode: u64) -> Remembered {
        if let Some(holder) = self.found.get(&inode).copied() {
            if holds(holder, inode)
                && let Some(owner) = owner(holder.pid)
            {
                return Remembered::Held(owner);
            }
            self.found.remove(&inode);
        }
        match self.absent.get(&inode) {
            Some(since) if since.elapsed() < ABSENT_FOR => Remembered::ByNobody,
            _ => Remembered::Nothing,
        }
    }

    /// Looks for sockets, first among `likely` processes (those of the socket's netns), then among all, each time in
    /// the order of pids. What is not found is remembered as such.
    pub(super) fn search(&mut self, wanted: &BTreeSet<u64>, likely: &BTreeSet<u32>) {
        if self.found.len() > REMEMBERED || self.absent.len() > REMEMBERED {
            self.found.clear();
            self.absent.clear();
        }
        let mut open: HashSet<u64> = wanted.iter().copied().collect();
        let others = || all().into_iter().filter(|pid| !likely.contains(pid)).collect();
        let passes: [&dyn Fn() -> BTreeSet<u32>; 2] = [&|| likely.clone(), &others];
        for pids in passes {
            if open.is_empty() {
                return;
            }
            for pid in pids() {
                for (inode, descriptor) in sockets(pid, &open) {
                    open.remove(&inode);
                    self.found.insert(inode, Holder { pid, descriptor });
                }
                if open.is_empty() {
                    return;
                }
            }
        }
        let now = Instant::now();
        self.absent.extend(open.into_iter().map(|inode| (inode, now)));
    }
}

fn all() -> BTreeSet<u32> {
    numbers("/proc".into()).collect()
}

fn numbers(folder: PathBuf) -> impl Iterator<Item = u32> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The wanted sockets that a process has open, with their descriptors.
fn sockets(pid: u32, wanted: &HashSet<u64>) -> BTreeMap<u64, u32> {
    numbers(format!("/proc/{pid}/fd").into())
        .filter_map(|descriptor| {
            let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).ok()?;
            let inode = socket_inode(link.to_str()?)?;
            wanted.contains(&inode).then_some((inode, descriptor))
        })
        .collect()
}

fn holds(holder: Holder, inode: u64) -> bool {
    fs::read_link(format!("/proc/{}/fd/{}", holder.pid, holder.descriptor))
        .ok()
        .and_then(|link| socket_inode(link.to_str()?))
        == Some(inode)
}

fn socket_inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn owner(pid: u32) -> Option<Owner> {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(Owner {
        pid,
        comm: comm.trim_end_matches('\n').to_owned(),
        ..Owner::default()
    })
}

/// The thread that finds owners of sockets. It rests three times as long as it searched, so that a flood of unknown
/// sockets cannot take more than a quarter of a CPU.
pub(super) fn find_owners(shared: &Shared, questions: &mpsc::Receiver<Question>) {
    let mut processes = Processes::default();
    while let Ok(question) = questions.recv() {
        if shared.stopped() {
            return;
        }
        let mut wanted: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let mut searched = Vec::new();
        for question in std::iter::once(question).chain(questions.try_iter()) {
            let Question::Process { netns, inode } = question else {
                continue;
            };
            let remembered = processes.remembered(inode);
            if remembered == Remembered::Nothing {
                wanted.entry(netns).or_default().insert(inode);
                searched.push((question, inode));
            } else {
                shared.answer(question, reply(shared, inode, remembered));
            }
        }
        let started = Instant::now();
        for (netns, inodes) in wanted {
            let likely = shared.discovery().members(netns);
            processes.search(&inodes, &likely);
        }
        let took = started.elapsed();
        for (question, inode) in searched {
            let remembered = processes.remembered(inode);
            shared.answer(question, reply(shared, inode, remembered));
        }
        std::thread::sleep((took * 3).min(LONGEST_REST));
    }
}

fn reply(shared: &Shared, inode: u64, remembered: Remembered) -> Reply {
    match remembered {
        Remembered::Held(owner) => Ok(Answer::Owner(named(&shared.names(), owner))),
        _ => Err(format!("no process holds socket {inode} (any more)")),
    }
}

/// The owner with its pod and container, by its cgroup.
fn named(names: &Names, mut owner: Owner) -> Owner {
    if names.is_empty() {
        return owner;
    }
    let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", owner.pid)).unwrap_or_default();
    if let Some(named) = names.of_cgroup(&cgroup) {
        owner.pod.clone_from(&named.pod);
        owner.container.clone_from(&named.container);
    }
    owner
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn links_of_sockets_are_read() {
        assert_eq!(socket_inode("socket:[12345]"), Some(12345));
        assert_eq!(socket_inode("pipe:[12345]"), None);
        assert_eq!(socket_inode("/dev/null"), None);
        assert_eq!(socket_inode("socket:[x]"), None);
    }

    #[test]
    fn the_holder_is_found_remembered_and_forgotten() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
        let inode = socket_inode(link.to_str().unwrap()).unwrap();
        let mut processes = Processes::default();
        assert_eq!(processes.remembered(inode), Remembered::Nothing);
        processes.search(&[inode].into(), &[std::process::id()].into());
        let Remembered::Held(owner) = processes.remembered(inode) else {
            panic!("this process holds it");
        };
        assert_eq!(owner.pid, std::process::id());
        drop(socket);
        assert_eq!(processes.remembered(inode), Remembered::Nothing);
        processes.search(&[inode].into(), &BTreeSet::new());
        assert_eq!(processes.remembered(inode), Remembered::ByNobody);
    }
}
