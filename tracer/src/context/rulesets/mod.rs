//! The rules of a netns that can end a packet, with their counters. They are
//! only read, and nothing is asked that would make the kernel load a module.

mod legacy;
mod nftables;

use std::{fs, io, path::Path, time::Duration};

use super::clock;
use crate::diagnose::{BaseChain, Ending, HookPoints, NfQueue};

/// The engine as evidence names it.
const NFTABLES: &str = "nftables";
const LEGACY: &str = "iptables-legacy";

/// A rule, or the policy of a base chain, that can end a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ender {
    /// The same in another reading, if it is the same rule.
    pub(super) identity: String,
    /// What it does.
    pub(super) ending: Ending,
    /// The chains at a hook point by which a packet comes to it.
    pub(super) bases: Vec<(HookPoints, BaseChain)>,
    /// The rule within.
    pub(super) rule: String,
    /// The command that shows it.
    pub(super) list: String,
    /// Packets that it took; `None`: it does not count, or counts others, too.
    pub(super) packets: Option<u64>,
}

impl Ender {
    /// Where packets come to it.
    pub(super) fn points(&self) -> HookPoints {
        self.bases
            .iter()
            .fold(HookPoints::NONE, |points, (more, _)| points.with(*more))
    }

    pub(super) fn is_nftables(&self) -> bool {
        self.bases.iter().any(|(_, base)| base.engine == NFTABLES)
    }
}

/// All of a netns at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// Kernel's monotonic clock before the first rule was read, in nanoseconds.
    pub(super) begun: u64,
    /// The same after the last one.
    pub(super) ended: u64,
    pub(super) enders: Vec<Ender>,
    /// What could not be read, and why.
    pub(super) unread: Vec<String>,
}

/// Reads what the netns that the thread is in has, and tells what CPU time that took.
pub(super) fn read() -> (Reading, Duration) {
    let start = clock::thread_time();
    let mut reading = Reading {
        begun: clock::monotonic_ns(),
        ..Reading::default()
    };
    let mut take = |engine: &str, read: io::Result<Vec<Ender>>| match read {
        Ok(enders) => reading.enders.extend(enders),
        Err(error) => reading.unread.push(format!("{engine}: {error}")),
    };
    if is_loaded("nf_tables") {
        take(NFTABLES, nftables::read());
    }
    for family in [legacy::V4, legacy::V6] {
        for table in family.tables() {
            take(
                &format!("{LEGACY}, {} {table}", family.name),
                legacy::read(family, &table),
            );
        }
    }
    if is_loaded("ebtables") {
        reading
            .unread
            .push("ebtables-legacy: its rules are not read".to_owned());
    }
    reading.ended = clock::monotonic_ns();
    (reading, clock::thread_time().saturating_sub(start))
}

/// The queues to which rules of the netns that the thread is in can give packets.
///
/// # Errors
/// The kernel does not show them.
pub(super) fn queues() -> io::Result<Vec<NfQueue>> {
    if !is_loaded("nfnetlink_queue") {
        return Ok(Vec::new());
    }
    fs::read_to_string("/proc/thread-self/net/netfilter/nfnetlink_queue").map(|text| parse_queues(&text))
}

/// A line each (`seq_show`, net/netfilter/nfnetlink_queue.c, 5.10 - 7.3): number, port id, waiting, copy mode, copy range,
/// dropped, dropped for the program's buffer, last packet's id, 1.
fn parse_queues(text: &str) -> Vec<NfQueue> {
    let queue = |line: &str| {
        let numbers: Vec<u64> = line
            .split_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let &[number, port_id, waiting, _, _, dropped, user_dropped, ..] = numbers.as_slice() else {
            return None;
        };
        Some(NfQueue {
            number: number as u16,
            port_id: port_id as u32,
            waiting: waiting as u32,
            dropped,
            user_dropped,
        })
    };
    text.lines().filter_map(queue).collect()
}

/// Whether a module is there; asking one that is not would load it.
fn is_loaded(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists()
}

/// A file below `/proc/net` of the netns that the thread is in, empty where there is none.
fn proc_net(name: &str) -> String {
    fs::read_to_string(Path::new("/proc/thread-self/net").join(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_a_line_each() {
        let queues = parse_queues("    7  23948     3 2 65531     5     6       12  1\nnonsense\n");
        let [queue] = queues.as_slice() else {
            panic!("not one queue: {queues:?}")
        };
        assert_eq!((queue.number, queue.port_id, queue.waiting), (7, 23948, 3));
        assert_eq!((queue.dropped, queue.user_dropped), (5, 6));
    }
}
