//! The kernel's own counters of a network namespace.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::{Netns, Result};

/// A snapshot of `/proc/net/{netstat,snmp,snmp6}` and, where present,
/// `/proc/net/stat/nf_conntrack`; names as `nstat` prints them
/// (`TcpExtListenDrops`, `Ip6InNoRoutes`), those of conntrack as
/// `conntrack:insert_failed`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    values: BTreeMap<String, u64>,
}

impl Counters {
    /// Reads all counters of a netns.
    pub fn read(netns: &Netns) -> Result<Self> {
        let mut values = BTreeMap::new();
        values.extend(parse_pairs(&netns.proc_net("netstat")?));
        values.extend(parse_pairs(&netns.proc_net("snmp")?));
        if let Ok(text) = netns.proc_net("snmp6") {
            values.extend(parse_columns(&text));
        }
        if let Ok(text) = netns.proc_net("stat/nf_conntrack") {
            values.extend(parse_per_cpu("conntrack", &text));
        }
        Ok(Self { values })
    }

    /// The value of a counter; zero where the kernel has none of this name.
    pub fn get(&self, name: &str) -> u64 {
        self.values.get(name).copied().unwrap_or(0)
    }

    /// Whether the kernel has a counter of this name.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// How much a counter grew since `before`.
    pub fn since(&self, before: &Self, name: &str) -> u64 {
        self.get(name).saturating_sub(before.get(name))
    }
}

/// How much one counter of a netns grew since `before`.
pub(crate) fn grown(netns: &Netns, before: &Counters, name: &str) -> Result<u64> {
    Ok(Counters::read(netns)
        .with_context(|| format!("counter {name}"))?
        .since(before, name))
}

/// Lines in pairs: names, then values, both with the group in front.
fn parse_pairs(text: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for pair in lines.chunks_exact(2) {
        let (Some((group, names)), Some((_, values))) = (pair[0].split_once(':'), pair[1].split_once(':'))
        else {
            continue;
        };
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if let Ok(value) = value.parse() {
                found.push((format!("{group}{name}"), value));
            }
        }
    }
    found
}

/// One name and value a line.
fn parse_columns(text: &str) -> Vec<(String, u64)> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(char::is_whitespace)?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}

/// A line of names, then a line of hexadecimal values per CPU; summed.
fn parse_per_cpu(group: &str, text: &str) -> Vec<(String, u64)> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    let mut sums = vec![0_u64; names.len()];
    for line in lines {
        for (sum, value) in sums.iter_mut().zip(line.split_whitespace()) {
            *sum += u64::from_str_radix(value, 16).unwrap_or(0);
        }
    }
    names
        .iter()
        .zip(sums)
        .map(|(name, sum)| (format!("{group}:{name}"), sum))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_take_the_group_into_the_name() {
        let text = "TcpExt: SyncookiesSent ListenDrops\nTcpExt: 3 7\nIp: Forwarding DefaultTTL\nIp: 1 64\n";
        assert_eq!(
            parse_pairs(text),
            [
                ("TcpExtSyncookiesSent".to_owned(), 3),
                ("TcpExtListenDrops".to_owned(), 7),
                ("IpForwarding".to_owned(), 1),
                ("IpDefaultTTL".to_owned(), 64),
            ]
        );
    }

    #[test]
    fn columns_are_a_name_and_a_value() {
        assert_eq!(
            parse_columns("Ip6InReceives                   \t12\nIcmp6InMsgs \t0\n"),
            [("Ip6InReceives".to_owned(), 12), ("Icmp6InMsgs".to_owned(), 0)]
        );
    }

    #[test]
    fn per_cpu_values_are_hexadecimal_and_summed() {
        let text =
            "entries  clashres insert_failed\n00000010  00000001 0000000a\n00000010  00000002 00000001\n";
        assert_eq!(
            parse_per_cpu("conntrack", text),
            [
                ("conntrack:entries".to_owned(), 32),
                ("conntrack:clashres".to_owned(), 3),
                ("conntrack:insert_failed".to_owned(), 11),
            ]
        );
    }
}
