//! The kernel's own counters of a netns, as far as [`crate::diagnose`] knows
//! which drops add to them.

use std::{collections::BTreeMap, fs};

use crate::diagnose::{Moved, counter_names};

/// Reads those of the netns that the thread is in. What the kernel does not have, or does not show, is absent.
pub(super) fn read() -> Moved {
    let file = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
    let mut found = BTreeMap::new();
    pairs(&file("netstat"), &mut found);
    pairs(&file("snmp"), &mut found);
    columns(&file("snmp6"), &mut found);
    per_cpu("conntrack", &file("stat/nf_conntrack"), &mut found);
    counter_names()
        .filter_map(|name| Some((name, *found.get(name)?)))
        .collect()
}

/// How far they moved.
pub(super) fn moved(before: &Moved, now: &Moved) -> Moved {
    now.iter()
        .map(|(name, value)| {
            (
                *name,
                value.saturating_sub(before.get(name).copied().unwrap_or(0)),
            )
        })
        .collect()
}

/// Lines in pairs, names and values, both with the group in front (`net/ipv4/proc.c`, 5.10 - 7.3).
fn pairs(text: &str, found: &mut BTreeMap<String, u64>) {
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.chunks_exact(2) {
        let (Some((group, names)), Some((_, values))) = (pair[0].split_once(':'), pair[1].split_once(':'))
        else {
            continue;
        };
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if let Ok(value) = value.parse() {
                found.insert(format!("{group}{name}"), value);
            }
        }
    }
}

/// A name and a value a line (`net/ipv6/proc.c`, 5.10 - 7.3).
fn columns(text: &str, found: &mut BTreeMap<String, u64>) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(Ok(value))) = (words.next(), words.next().map(str::parse)) {
            found.insert(name.to_owned(), value);
        }
    }
}

/// A line of names, then hexadecimal values of each CPU (`net/netfilter/nf_conntrack_standalone.c`, 5.10 - 7.3).
fn per_cpu(group: &str, text: &str, found: &mut BTreeMap<String, u64>) {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    for line in lines {
        for (name, value) in names.iter().zip(line.split_whitespace()) {
            if let Ok(value) = u64::from_str_radix(value, 16) {
                *found.entry(format!("{group}:{name}")).or_default() += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_forms_are_read() {
        let mut found = BTreeMap::new();
        pairs(
            "TcpExt: SyncookiesSent ListenDrops\nTcpExt: 3 7\nIp: Forwarding\nIp: 1\n",
            &mut found,
        );
        columns("Udp6NoPorts    \t12\nnonsense\n", &mut found);
        per_cpu(
            "conntrack",
            "entries insert_failed\n00000010 0000000a\n00000010 00000006\n",
            &mut found,
        );
        assert_eq!(found["TcpExtListenDrops"], 7);
        assert_eq!(found["IpForwarding"], 1);
        assert_eq!(found["Udp6NoPorts"], 12);
        assert_eq!(found["conntrack:insert_failed"], 16);
        assert!(!found.contains_key("nonsense"));
    }

    #[test]
    fn a_counter_that_came_later_moved_from_zero() {
        let before = Moved::from([("UdpNoPorts", 5)]);
        let now = Moved::from([("UdpNoPorts", 7), ("conntrack:insert_failed", 2)]);
        assert_eq!(
            moved(&before, &now),
            Moved::from([("UdpNoPorts", 2), ("conntrack:insert_failed", 2)])
        );
    }

    #[test]
    fn the_netns_of_this_thread_has_counters() {
        assert!(read().contains_key("TcpExtListenDrops"));
    }
}
