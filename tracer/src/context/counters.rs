//! The kernel's own counters of a netns, as far as [`crate::diagnose`] knows
//! which drops add to them.

use std::{collections::BTreeMap, fs};

use crate::diagnose::{Moved, PROOFS, counter_names};

/// Reads those of the netns that the thread is in. What the kernel does not have, or does not show, is absent.
pub(super) fn read() -> Moved {
    let mut found = BTreeMap::new();
    for text in [file("netstat"), file("snmp")] {
        found.extend(pairs(&text).map(|(group, name, value)| (format!("{group}{name}"), value)));
    }
    columns(&file("snmp6"), &mut found);
    per_cpu("conntrack", &file("stat/nf_conntrack"), &mut found);
    counter_names()
        .filter_map(|name| Some((name, *found.get(name)?)))
        .collect()
}

/// `/proc/net/netstat` of the netns that the thread is in.
pub(super) fn netstat() -> String {
    file("netstat")
}

/// `TcpExtTCPSynRetrans` in `/proc/net/netstat`: SYNs that were sent again.
pub(super) fn syn_retransmissions(netstat: &str) -> Option<u64> {
    pairs(netstat)
        .find(|(group, name, _)| (*group, *name) == ("TcpExt", "TCPSynRetrans"))
        .map(|(_, _, value)| value)
}

/// The counters of [`PROOFS`] in `/proc/net/netstat`.
pub(super) fn proofs(netstat: &str) -> Moved {
    let wanted = |name: &str| {
        let mut all = PROOFS.iter().flat_map(|proof| proof.counters);
        all.find(|each| each.strip_prefix("TcpExt") == Some(name))
            .copied()
    };
    pairs(netstat)
        .filter(|(group, ..)| *group == "TcpExt")
        .filter_map(|(_, name, value)| Some((wanted(name)?, value)))
        .collect()
}

/// The counters of [`PROOFS`] among these.
pub(super) fn proofs_of(all: &Moved) -> Moved {
    let names = PROOFS.iter().flat_map(|proof| proof.counters);
    names.filter_map(|name| Some((*name, *all.get(name)?))).collect()
}

/// A file of the netns that the thread is in; empty where the kernel does not have it.
fn file(name: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default()
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

/// Lines in pairs, names and values, both with the group in front (`net/ipv4/proc.c`, 5.10 - 7.3): gives group, name
/// and value.
fn pairs(text: &str) -> impl Iterator<Item = (&str, &str, u64)> {
    let (names, values) = (text.lines().step_by(2), text.lines().skip(1).step_by(2));
    names
        .zip(values)
        .filter_map(|(names, values)| {
            let ((group, names), (_, values)) = (names.split_once(':')?, values.split_once(':')?);
            let pairs = names.split_whitespace().zip(values.split_whitespace());
            Some(pairs.filter_map(move |(name, value)| Some((group, name, value.parse().ok()?))))
        })
        .flatten()
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
        let text =
            "TcpExt: SyncookiesSent MaxConn ListenDrops\nTcpExt: 3 -1 7\nIp: Forwarding\nIp: 1\nIpExt: Odd\n";
        assert_eq!(
            pairs(text).collect::<Vec<_>>(),
            [
                ("TcpExt", "SyncookiesSent", 3),
                ("TcpExt", "ListenDrops", 7),
                ("Ip", "Forwarding", 1)
            ]
        );
        columns("Udp6NoPorts    \t12\nnonsense\n", &mut found);
        per_cpu(
            "conntrack",
            "entries insert_failed\n00000010 0000000a\n00000010 00000006\n",
            &mut found,
        );
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
    fn counters_that_prove_a_cause_are_picked() {
        let text = "TcpExt: SyncookiesSent ListenOverflows ListenDrops OfoPruned\nTcpExt: 3 7 8 2\nIpExt: InNoRoutes\nIpExt: 1\n";
        assert_eq!(
            proofs(text),
            Moved::from([("TcpExtListenOverflows", 7), ("TcpExtOfoPruned", 2)])
        );
        assert_eq!(proofs("IpExt: InNoRoutes\nIpExt: 1\n"), Moved::new());
    }

    #[test]
    fn the_netns_of_this_thread_has_counters() {
        assert!(read().contains_key("TcpExtListenDrops"));
        assert!(syn_retransmissions(&netstat()).is_some());
        assert!(proofs(&netstat()).contains_key("TcpExtListenOverflows"));
    }
}
