//! The kernel's own counters of a netns, as far as [`crate::diagnose`] knows
//! which drops add to them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
};

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

/// `/proc/net/netstat` of a netns, kept open: the kernel writes it anew when it is read from its start, and knows by then
/// how much room that takes (`seq_read_iter`, fs/seq_file.c, 5.10 - 7.3).
pub(super) struct Netstat(File);

impl Netstat {
    /// That of the netns that the thread is in. It keeps the netns alive.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn open() -> io::Result<Self> {
        File::open("/proc/thread-self/net/netstat").map(Self)
    }

    /// The counters that are watched all the time, as of now.
    ///
    /// # Errors
    /// The kernel does not show them.
    pub(super) fn watched(&self) -> io::Result<WatchedCounters> {
        // The kernel gives all of it at once, as far as there is room.
        let mut text = vec![0; NETSTAT_READ];
        let length = self.0.read_at(&mut text, 0)?;
        Ok(watched_in(&String::from_utf8_lossy(&text[..length])))
    }
}

/// Bytes of `/proc/net/netstat` that are read: those of TCP stand first, and take 4,000 or so.
const NETSTAT_READ: usize = 16 << 10;

/// Counters that are watched all the time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WatchedCounters {
    /// Those of [`PROOFS`].
    pub(super) proofs: Moved,
    /// SYNs that were sent again (`TcpExtTCPSynRetrans`).
    pub(super) syn_retransmissions: Option<u64>,
}

/// Those in a `/proc/net/netstat`.
fn watched_in(netstat: &str) -> WatchedCounters {
    let mut found = WatchedCounters::default();
    let names = || PROOFS.iter().flat_map(|proof| proof.counters);
    let mut lines = netstat.lines();
    let of_tcp = lines.next().zip(lines.next()).and_then(|(names, values)| {
        Some((names.strip_prefix("TcpExt: ")?, values.strip_prefix("TcpExt: ")?))
    });
    let Some((all, values)) = of_tcp else {
        return found;
    };
    for (name, value) in all.split(' ').zip(values.split(' ')) {
        if name == "TCPSynRetrans" {
            found.syn_retransmissions = value.parse().ok();
        } else if let Some(known) = names().find(|known| known.strip_prefix("TcpExt") == Some(name))
            && let Ok(value) = value.parse()
        {
            found.proofs.insert(known, value);
        }
    }
    found
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
        let text = "TcpExt: SyncookiesSent ListenOverflows TCPSynRetrans OfoPruned\nTcpExt: 3 7 8 2\nIpExt: InNoRoutes\nIpExt: 1\n";
        assert_eq!(
            watched_in(text),
            WatchedCounters {
                proofs: Moved::from([("TcpExtListenOverflows", 7), ("TcpExtOfoPruned", 2)]),
                syn_retransmissions: Some(8),
            }
        );
        assert_eq!(
            watched_in("IpExt: InNoRoutes\nIpExt: 1\n"),
            WatchedCounters::default()
        );
    }

    #[test]
    fn the_netns_of_this_thread_has_counters() {
        assert!(read().contains_key("TcpExtListenDrops"));
        let netstat = Netstat::open().unwrap();
        for _ in 0..2 {
            let watched = netstat.watched().unwrap();
            assert!(watched.syn_retransmissions.is_some());
            assert_eq!(
                watched.proofs.keys().collect::<Vec<_>>(),
                proofs_of(&read()).keys().collect::<Vec<_>>()
            );
        }
    }
}
